"""Group scales: with data, scales of weight-only matmuls lower the error at the outputs of layers."""

import numpy as np
import pytest
from onnx_graphs import Maker

import detent as dt
import detent.onnx as qo
from detent.onnx.group_scales import with_fitted_scales

WIDTH, OUTPUTS = 80, 24  # groups of 32, the last one shorter
RECIPES = {"affine": "w4a16-g32", "symmetric": dt.Recipe([dt.Rule(weight="int4/group32")])}


def correlated(count, seed=1, length=64):
    """Make inputs with a mean and few strong directions, as behind a GELU."""
    rng = np.random.default_rng(0)
    mixing, mean = rng.normal(size=(6, WIDTH)), np.abs(rng.normal(size=WIDTH))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 1, length, 6)) @ mixing + mean + 0.1 * rng.normal(size=(count, 1, length, WIDTH))
    return [{"x": each.astype(np.float32)} for each in x]


def network(*, transposed=False):
    m = Maker()
    weight = np.random.default_rng(3).normal(size=(WIDTH, OUTPUTS)).astype(np.float32)
    if not transposed:
        return m.model([("x", [1, "n", WIDTH])], [m.matmul("x", WIDTH, OUTPUTS, name="fc", weight=weight)])
    flat = m.add("Reshape", ["x", m.constant(np.array([-1, WIDTH]))])
    y = m.add("Gemm", [flat, m.constant(np.ascontiguousarray(weight.T))], name="fc", transB=1)
    return m.model([("x", [1, "n", WIDTH])], [y])


def planned(recipe, **options):
    return qo.plan(qo.prepare(network(**options), low_bits=True), recipe)


def params_of(plan):
    return plan.weight_params(plan.layers[0])


def weight_of(plan):
    return plan.graph.array(plan.layers_by_name["fc"].weight)


def output_error(plan, feeds):
    """Mean squared error at the output of the layer."""
    weight = weight_of(plan)
    x = np.concatenate([feed["x"][0] for feed in feeds]).astype(np.float64)
    error = dt.fake_quantize(weight, params_of(plan)) - weight
    return np.mean((x @ (error if error.shape[0] == WIDTH else error.T)) ** 2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_error_on_new_data_falls(recipe):
    plan = planned(recipe)
    fitted = with_fitted_scales(plan, correlated(8))
    assert output_error(fitted, correlated(8, seed=2)) < 0.75 * output_error(plan, correlated(8, seed=2))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_squared_error_of_the_weight_is_at_most_that_of_min_max(recipe):
    plan = with_fitted_scales(planned(recipe), correlated(8))
    weight, params = weight_of(plan), params_of(plan)
    minmax = dt.QuantParams.from_data(params.spec, weight)
    assert (params.scale <= minmax.scale).all()
    squares = [np.square(weight.astype(np.float64) - dt.fake_quantize(weight, each)) for each in (params, minmax)]
    for start in range(0, WIDTH, 32):
        errors, limits = (each[start : start + 32].sum(axis=0) for each in squares)
        assert (errors <= limits * (1 + 1e-6)).all()


def test_a_transposed_weight_gets_the_same_scales():
    straight, turned = (
        params_of(with_fitted_scales(planned("w4a16-g32", transposed=transposed), correlated(4)))
        for transposed in (False, True)
    )
    same = [np.mean(a == b) for a, b in ((straight.scale, turned.scale), (straight.zero_point, turned.zero_point))]
    assert min(same) > 0.95  # sums of float32 may be in a different order


@pytest.mark.parametrize("recipe", ["w8a16", "w4a8", "w8a8-dynamic"])
def test_other_layers_keep_their_scales(recipe):
    plan = planned(recipe)
    assert with_fitted_scales(plan, correlated(2)) is plan


def test_the_whole_job_fits_scales_and_is_verified(tmp_path):
    model, data = network(), correlated(32)
    fitted = qo.quantize(model, tmp_path / "f.onnx", data, "w4a16-g32", keep_float="none", progress=False)
    assert fitted.steps[0].startswith("fitted the scales of groups: ")
    plain = qo.quantize(model, tmp_path / "p.onnx", None, "w4a16-g32", progress=False)
    assert fitted.nbytes_after == pytest.approx(plain.nbytes_after, rel=0.05)
    held_out = correlated(4, seed=5)
    reports = [dt.verify(model, each.output, held_out) for each in (plain, fitted)]
    assert all(report.ok for report in reports)
    before, after = (report.end_to_end["accuracy_level_0"].output_sqnr_db["t1"] for report in reports)
    assert after > before + 1.5


def test_effort_fast_does_not_fit_scales(tmp_path):
    report = qo.quantize(network(), tmp_path / "f.onnx", correlated(4), "w4a16-g32", effort="fast", progress=False)
    assert report.steps == ()
