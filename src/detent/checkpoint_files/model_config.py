"""ModelConfig: ``config.json`` of a model, read as untrusted input.

transformers wrote rope parameters in several forms over time: ``rope_theta`` and ``rope_scaling`` beside other keys, or
``rope_parameters``, with one entry per kind of attention if kinds differ. ``rope`` returns one form for all of them.
The configuration of a model with images is in ``text_config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from reprlib import repr as brief
from typing import Any

from detent.errors import FileFormatError

__all__ = ["ModelConfig"]

MAX_COUNT = 1 << 31  # GGUF stores counts in 32 bits
_THETA = ("rope_theta", "global_rope_theta", "rotary_emb_base")
_LOCAL_THETA = ("rope_local_base_freq", "local_rope_theta")


@dataclass(frozen=True)
class ModelConfig:
    """Values of ``config.json``; every value is checked when it is read.

    Attributes:
        values: the content; ``text_config`` is merged into it.
        classes: names of the model classes, from ``architectures``.
    """

    values: Mapping[str, Any]
    classes: tuple[str, ...]

    @classmethod
    def from_json(cls, config: Mapping[str, Any] | None) -> "ModelConfig":
        """Check the top level of ``config.json``.

        >>> ModelConfig.from_json({"architectures": ["LlamaForCausalLM"], "num_layers": 2}).integer("num_layers")
        2
        """
        if config is None:
            raise FileFormatError("the checkpoint has no config.json: add the file of the original model")
        classes = config.get("architectures")
        if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes) or not classes:
            raise FileFormatError(
                f"config.json: architectures is {brief(classes)}, expected a list of names, such as "
                '["LlamaForCausalLM"]'
            )
        text = config.get("text_config")
        merged = {**config, **text} if isinstance(text, Mapping) else dict(config)
        return cls(merged, tuple(classes))

    def get(self, *names: str) -> Any:  # noqa: ANN401 - JSON
        """Return the first of these values that is not null, or None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an integer of at least ``minimum``, from the first of these names that is present."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < MAX_COUNT:
            raise FileFormatError(
                f"config.json: {names[0]} is {brief(value)}, expected an integer from {minimum} to {MAX_COUNT - 1}"
            )
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number, from the first of these names that is present."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise FileFormatError(f"config.json: {names[0]} is {brief(value)}, expected a finite number")
        return float(value)

    def is_true(self, name: str, *, default: bool = False) -> bool:
        """Return a truth value."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise FileFormatError(f"config.json: {name} is {brief(value)}, expected true or false")
        return value

    @property
    def head_size(self) -> int:
        """The number of elements of an attention head."""
        given = self.get("head_dim")
        if given is not None:
            return self.integer("head_dim")
        hidden, heads = self.integer("hidden_size", "n_embd"), self.integer("num_attention_heads", "n_head")
        if hidden % heads:
            raise FileFormatError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        return hidden // heads

    def rope(self, kind: str = "full_attention") -> "ModelConfig":
        """Return the rope parameters for a kind of attention, with ``rope_type`` and ``rope_theta`` if known."""
        given = self.get("rope_parameters", "rope_scaling")
        parameters: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        by_kind = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
        if by_kind:
            parameters = dict(by_kind.get(kind, {}))
        elif kind != "full_attention":
            parameters = {}
        theta = self.get(*_THETA) if kind == "full_attention" else self.get(*_LOCAL_THETA)
        if theta is not None:
            parameters.setdefault("rope_theta", theta)
        if "type" in parameters:
            parameters.setdefault("rope_type", parameters["type"])
        return ModelConfig(parameters, self.classes)
