"""Streaming quantization of a checkpoint: rows flow through read, transform, quantize and write.

Memory is bounded by the rows in work, whatever the size of the model. Without an executor, one thread reads the next
rows while the kernels, which use all threads, quantize the current ones, and one thread writes the previous ones. With
an executor, workers do all three steps, and write into the partial file at known positions. The bytes are the same in
both cases, and with any number of workers.
"""

import os
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

from detent import __version__
from detent.block_tensor import ScalePolicy
from detent.checkpoint.conversion import (
    Conversion,
    ConvertedTensor,
    ImportanceLike,
    SourceLike,
    decide_conversion,
)
from detent.checkpoint.conversion_report import ConversionPlan, ConversionReport, tensor_lines
from detent.checkpoint.partial_file import PartialFile
from detent.checkpoint.row_items import Bytes, ItemDone, RowItem, encode, item_environment, load, run_item
from detent.checkpoint.sources import files_digest
from detent.checkpoint_files.tensor_source import StoredTensor, TensorSource
from detent.checks import as_integer
from detent.errors import SpecError
from detent.recipe import Recipe
from detent.storage import check_directory
from detent.tables import parse_bytes
from detent.work_items import as_executor, run_items, workers_of

__all__ = ["plan", "quantize"]

DEFAULT_BUDGET = "4 GB"
MAX_CHUNK_ELEMENTS = 1 << 22  # 16 MB of float32; larger items are not faster
BYTES_PER_ELEMENT = 20  # of an item in work: source, float32, a reordered copy, result, masks
ITEMS_IN_WORK = 2  # one is read while one is quantized
FIXED_BYTES = 1 << 26  # for the header, the vocabulary and tables
SAMPLE_ELEMENTS = 1 << 20  # per type, to estimate the time
Progress = Callable[[int, int | None], object]


def quantize(  # noqa: PLR0913 - keyword arguments
    source: SourceLike,
    output: str | os.PathLike[str],
    to: str = "gguf:Q4_K_M",
    *,
    importance: ImportanceLike | None = None,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    memory_budget: int | str = DEFAULT_BUDGET,
    progress: Progress | None = None,
    resume: bool = True,
    executor: Executor | None = None,
    pre_tokenizer: str | None = None,
    vocabulary: bool = True,
    scales: ScalePolicy = "raise",
) -> ConversionReport:
    """Quantize a checkpoint to a file that llama.cpp runs, row by row.

    The file is written under the name ``.<name>.<job>.partial`` beside the output and renamed at the end. If the job is
    killed, the same call goes on where it stopped, and ends with the same bytes.

    Args:
        source: checkpoint directory, file, or the result of ``qc.open``.
        output: path of the file to write.
        to: format and mixture: "gguf:Q4_K_M", "gguf:Q8_0", "gguf:BF16", ... The mixture chooses a type per tensor, as
            llama.cpp does.
        importance: importance matrix file, or one weight per column by tensor name.
        recipe: recipe whose rules replace the mixture's choice: patterns match names such as "blk.0.ffn_down", and
            weights are block formats; ``skip`` keeps a tensor in float.
        memory_budget: bytes for rows in work, such as "1 GB"; at least one row is in work. With an executor, the
            workers share it.
        progress: callback f(bytes written, total bytes).
        resume: go on with a partial file that an earlier run of the same job left; tensors in memory always start
            again.
        executor: an executor whose workers see the files under the same paths; see ``detent.cluster``.
        pre_tokenizer: name of the pre-tokenizer for llama.cpp, if it is not recognized.
        vocabulary: write the tokenizer of the checkpoint; without it, llama.cpp accepts only token ids.
        scales: "raise" rejects blocks whose scales become 0 or infinite in float16, "keep" writes them and warns.

    Raises:
        FileFormatError: a damaged checkpoint.
        UnsupportedError: an unknown architecture or tokenizer.
        NaNError, RangeError, ParamsError: weights that the file cannot represent; the message names tensor and index.
        SpecError: invalid arguments, or too little space on the disk.
        WorkerError: a worker failed, or the disk became full; the same call goes on.
    """
    start, target = time.perf_counter(), Path(output)
    _, chunk = _resources(memory_budget, executor)
    conversion = decide_conversion(
        source,
        to,
        importance=importance,
        recipe=recipe,
        pre_tokenizer=pre_tokenizer,
        vocabulary=vocabulary,
        scales=scales,
    )
    check_output(conversion.source, target)
    # Tensors in memory may change between two runs, and nothing would tell.
    is_resumable = resume and all(isinstance(tensor, StoredTensor) for tensor in conversion.source.values())
    partial = PartialFile(target, conversion.layout, _identity(conversion), resume=is_resumable)
    warnings = [*conversion.notes, *partial.warnings]
    with partial:
        items = [item for item in conversion.items(partial.path.absolute(), chunk) if not partial.has(item)]
        written, total = partial.resumed_nbytes, sum(each.nbytes for each in conversion.layout.tensors)
        with closing(_run_here(items, partial) if executor is None else _run_there(items, executor)) as results:
            for done in results:
                partial.record(done)
                written += (done.stop - done.start) * conversion.layout.tensors[done.tensor].row_bytes
                if done.warning:
                    warnings.append(done.warning)
                if progress is not None:
                    progress(written, total)
        partial.finish()
    return ConversionReport(
        conversion.to,
        tensor_lines(conversion),
        conversion.source.nbytes,
        conversion.layout.nbytes,
        target,
        time.perf_counter() - start,
        partial.resumed_nbytes,
        tuple(warnings),
    )


def plan(
    source: SourceLike,
    to: str = "gguf:Q4_K_M",
    *,
    importance: ImportanceLike | None = None,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    memory_budget: int | str = DEFAULT_BUDGET,
    executor: Executor | None = None,
    pre_tokenizer: str | None = None,
    vocabulary: bool = True,
    scales: ScalePolicy = "raise",
) -> ConversionPlan:
    """Return what ``quantize`` would write: types, bytes, memory and time; takes the same arguments.

    The sizes are exact. The time is measured on some rows of every type, with the kernels of this process.
    """
    workers, chunk = _resources(memory_budget, executor)
    conversion = decide_conversion(
        source,
        to,
        importance=importance,
        recipe=recipe,
        pre_tokenizer=pre_tokenizer,
        vocabulary=vocabulary,
        scales=scales,
    )
    elements = max((_largest_item(each, chunk) for each in conversion.tensors), default=0)
    return ConversionPlan(
        conversion.to,
        tensor_lines(conversion),
        conversion.source.nbytes,
        conversion.layout.nbytes,
        FIXED_BYTES + workers * ITEMS_IN_WORK * BYTES_PER_ELEMENT * elements,
        sum(_seconds(conversion).values()) / workers,
        conversion.notes,
    )


def check_output(source: TensorSource, target: Path) -> None:
    """Reject an output that is a file of the source, or whose directory cannot be written to."""
    check_directory(target.parent, error=SpecError)
    if target.is_dir():
        raise SpecError(f"{target} is a directory: pass a file name")
    for file in source.files:
        if os.path.realpath(file) == os.path.realpath(target) or (target.exists() and target.samefile(file)):
            raise SpecError(f"{target} is a file of the source: choose another output")


def _resources(memory_budget: int | str, executor: Executor | None) -> tuple[int, int]:
    """Return the number of workers, and the number of elements of an item that fits their budget."""
    if isinstance(memory_budget, str):
        budget = parse_bytes(memory_budget)
    else:
        budget = as_integer("memory_budget", memory_budget, at_least=1)
    workers = 1 if executor is None else workers_of(as_executor(executor))
    available = max(budget - FIXED_BYTES, budget // 4)
    return workers, max(1, min(MAX_CHUNK_ELEMENTS, available // (workers * ITEMS_IN_WORK * BYTES_PER_ELEMENT)))


def _largest_item(tensor: ConvertedTensor, chunk: int) -> int:
    columns = tensor.place.shape[-1]
    return min(max(chunk // columns, 1), tensor.place.rows) * columns


def _identity(conversion: Conversion) -> dict[str, Any]:
    """Return what identifies a job: the files of the source, and all decisions."""
    return {
        "detent": __version__,
        "source": conversion.source.digest,
        "files": files_digest(conversion.source.files),
        "importance": conversion.importance_digest,
        "scales": conversion.scales,
    }


def _run_here(items: list[RowItem], partial: PartialFile) -> Generator[ItemDone, None, None]:
    """Run items in this process: read ahead, quantize, write behind."""
    with ThreadPoolExecutor(1, "detent-read") as reader, ThreadPoolExecutor(1, "detent-write") as writer:
        ahead = [reader.submit(load, items[0])] if items else []
        writing: Future[ItemDone] | None = None
        for number, item in enumerate(items):
            rows = ahead.pop().result()
            if number + 1 < len(items):
                ahead.append(reader.submit(load, items[number + 1]))
            data, warning = encode(item, rows)
            del rows
            if writing is not None:
                yield writing.result()
            writing = writer.submit(_write, partial, item, data, warning)
            del data
        if writing is not None:
            yield writing.result()


def _write(partial: PartialFile, item: RowItem, data: Bytes, warning: str) -> ItemDone:
    partial.write(item, data)
    return ItemDone(item.tensor, item.start, item.stop, zlib.crc32(data.data), warning)


def _run_there(items: list[RowItem], executor: Executor) -> Generator[ItemDone, None, None]:
    """Run items on the workers of an executor."""
    yield from run_items(executor, run_item, items, item_environment)


def _seconds(conversion: Conversion) -> dict[str, float]:
    """Return the estimated seconds of each type: read and quantize some rows of its largest tensor."""
    largest: dict[str, ConvertedTensor] = {}
    elements: dict[str, int] = {}
    for tensor in conversion.tensors:
        name, size = tensor.place.type.name, prod(tensor.place.shape)
        elements[name] = elements.get(name, 0) + size
        if name not in largest or size > prod(largest[name].place.shape):
            largest[name] = tensor
    seconds = {}
    for name, tensor in largest.items():
        item = next(item for item in _sample_items(conversion, tensor))
        begin = time.perf_counter()
        encode(item, load(item))
        sampled = (item.stop - item.start) * item.place.shape[-1]
        seconds[name] = (time.perf_counter() - begin) * elements[name] / sampled
    return seconds


def _sample_items(conversion: Conversion, tensor: ConvertedTensor) -> Iterator[RowItem]:
    index = conversion.tensors.index(tensor)
    return (item for item in conversion.items(Path(), SAMPLE_ELEMENTS) if item.tensor == index)
