"""Every row of the golden tables, computed by the public functions."""

import numpy as np
import pytest

import detent as dt

from .tables import SYSTEMS, Case, cases, number, same_bits, tables

KINDS = ("forward", "gradient", "range", "ema")


@pytest.mark.parametrize("case", cases("forward"))
def test_code(case: Case) -> None:
    assert dt.quantize(case.x, case.params).codes.tolist() == [case.row["code"]], case.row["why"]


@pytest.mark.parametrize("case", cases("forward"))
def test_fake_quantized_value(case: Case) -> None:
    assert same_bits(dt.fake_quantize(case.x, case.params), case.array("y")), case.row["why"]


@pytest.mark.parametrize("case", cases("forward"))
def test_dequantized_code(case: Case) -> None:
    codes = np.array([case.row["code"]], dtype=case.spec.format.storage)
    assert same_bits(dt.dequantize(codes, case.params), case.array("y")), case.row["why"]


@pytest.mark.parametrize("case", cases("gradient"))
def test_gradient(case: Case) -> None:
    gx = dt.fake_quantize_backward(case.g, case.x, case.params, ste=case.ste)
    expected = case.array("gx")
    if "tolerance" in case.table:  # only for the platform's tanh
        assert abs(gx - expected) <= number(case.table["tolerance"]), case.row["why"]
    else:
        assert same_bits(gx, expected), case.row["why"]


@pytest.mark.parametrize("case", cases("range"))
def test_scale_of_a_range(case: Case) -> None:
    params = dt.QuantParams.from_range(case.spec, *case.array("lo"), *case.array("hi"))
    assert params.scale == number(case.row["scale"]), case.row["why"]


@pytest.mark.parametrize("case", cases("range"))
def test_zero_point_of_a_range(case: Case) -> None:
    params = dt.QuantParams.from_range(case.spec, *case.array("lo"), *case.array("hi"))
    assert params.zero_point == case.row["zero_point"], case.row["why"]


@pytest.mark.parametrize("case", cases("range"))
def test_calibrating_on_the_ends_of_a_range_gives_the_parameters_of_the_range(case: Case) -> None:
    params = dt.QuantParams.from_data(case.spec, np.array([*case.array("lo"), *case.array("hi")]))
    expected = (number(case.row["scale"]), case.row["zero_point"])
    assert (params.scale, params.zero_point) == expected, case.row["why"]


EMA_TABLES = [
    pytest.param(system, table, id=f"{system}-{table['spec']}-{table['decay']}")
    for system in SYSTEMS
    for table in tables(system, "ema")
]


def batches(system: str, table: dict[str, object]) -> list[Case]:
    """Rows of an EMA table, in order."""
    return [Case(system, table, row) for row in table["rows"]]  # type: ignore[attr-defined]  # a list of rows


@pytest.mark.parametrize(("system", "table"), EMA_TABLES)
def test_moving_average_of_the_range(system: str, table: dict[str, float]) -> None:
    observer = dt.observers.EMAMinMax(decay=table["decay"])
    for case in batches(system, table):
        observer.observe(np.array([*case.array("lo"), *case.array("hi")]))
        seen = observer.range()
        expected = np.array([*case.array("ema_lo"), *case.array("ema_hi")])
        assert same_bits(np.array([seen.lo, seen.hi], dtype=np.float32), expected), case.row["why"]


@pytest.mark.parametrize(("system", "table"), EMA_TABLES)
def test_moving_average_parameters(system: str, table: dict[str, float]) -> None:
    for case in (rows := batches(system, table))[:1]:
        fq = dt.FakeQuantize(case.spec, mode=dt.EMA(decay=table["decay"]))
    for case in rows:
        fq(np.array([*case.array("lo"), *case.array("hi")]))
        expected = (number(case.row["scale"]), case.row["zero_point"])
        assert (fq.scale, fq.zero_point) == expected, case.row["why"]


def learned(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of x, scale and zero point for one row."""
    return dt.fake_quantize_learned_backward(
        case.g, case.x, case.params, ste=case.ste, grad_scale=case.table["grad_scale"]
    )


@pytest.mark.parametrize("case", cases("learned"))
def test_learned_gradient_of_x(case: Case) -> None:
    assert same_bits(learned(case)[0], case.array("gx")), case.row["why"]


@pytest.mark.parametrize("case", cases("learned"))
def test_learned_gradient_of_the_scale(case: Case) -> None:
    assert learned(case)[1] == number(case.row["gs"]), case.row["why"]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_system_has_every_kind_of_table(system: str, kind: str) -> None:
    assert list(tables(system, kind))


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_enough_rows(system: str) -> None:
    assert sum(len(table["rows"]) for kind in KINDS for table in tables(system, kind)) >= 60


def test_a_literal_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="float32 cannot represent"):
        number(0.1)


def test_an_expression_is_rounded_once() -> None:
    # 2^-30 is lost if 1 + 2^-24 is rounded first: the tie would go down to 1.
    assert number("1 + 2**-24 + 2**-30") == np.float32(1 + 2**-23)
