"""Plans and health reports in a notebook: short reprs, escaped HTML tables, and plots."""

import sys

import pytest

import detent as dt

torch = pytest.importorskip("torch")

import detent.torch as qt  # noqa: E402
from tests.tools.recording_axes import RecordingAxes  # noqa: E402

nn = torch.nn
RECIPE = dt.Recipe([dt.Rule(weight="int4/axis0", input="uint8"), dt.Rule("2", skip=True)])


class Script(nn.Module):
    """A module with a name that HTML must escape."""

    def __init__(self):
        super().__init__()
        self.add_module("<script>", nn.Linear(4, 2))


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def calibrated():
    model = qt.prepare(small(), "w8a8")
    with qt.calibrating(model):
        model(torch.linspace(0, 1, 400).reshape(100, 4))
    return model


def clipping_report():
    return qt.health(calibrated(), [torch.linspace(0, 2, 4000).reshape(1000, 4)])


def test_reprs_are_one_line_without_defaults():
    model_plan = qt.plan(small(), RECIPE)
    summary = "1 of 2 layers quantized by a recipe of 2 rules; weights 96 -> 56 bytes, 1.71 times smaller"
    assert repr(model_plan) == f"<ModelPlan: {summary}>"
    assert str(model_plan).splitlines()[-1] == summary
    skipped = repr(model_plan.layers[1])
    assert skipped.startswith("LayerPlan(name='2', type='Linear', rule=1, reason=")
    assert "input" not in skipped
    report = clipping_report()
    assert repr(report) == "<HealthReport: 4 quantizers, 1 warning>"
    assert repr(qt.health(calibrated())["0.input_quantizer"]).endswith("mode='EMA(decay=0.99)', note='no data')")


def test_tables_in_html_have_all_rows_and_escaped_names():
    html = qt.plan(small(), RECIPE)._repr_html_()
    assert html.count("<tr>") == 3
    assert "1 of 2 layers quantized" in html
    model = Script()
    for html in (qt.plan(model, "w8a8")._repr_html_(), qt.health(qt.prepare(model, "w8a8"))._repr_html_()):
        assert "&lt;script&gt;" in html
        assert "<script" not in html


def test_html_of_health_lists_the_warnings():
    report = clipping_report()
    html = report._repr_html_()
    assert html.count("<div>! ") == len(report.warnings) > 0
    assert "no warnings" in qt.health(calibrated())._repr_html_()


def test_a_plan_plots_bits_of_weights_and_inputs():
    ax = RecordingAxes()
    assert qt.plan(small(), RECIPE).plot(ax=ax) is ax
    (weights, _), (inputs, _) = ax.calls_of("barh")
    assert weights == ([-0.2, 0.8], [4, 0])
    assert inputs == ([0.2, 1.2], [8, 0])
    assert [args for args, _ in ax.calls_of("text")] == [(0, 1, " float")]
    assert ax.calls_of("set_yticks") == [((range(2), ["0", "2"]), {})]


def test_health_plots_a_metric_and_marks_warnings_and_missing_data():
    ax, report = RecordingAxes(), clipping_report()
    assert report.plot(ax=ax) is ax
    (((rows, percents), keywords),) = ax.calls_of("barh")
    assert rows == range(4)
    assert percents == [100 * each.clip_fraction for each in report.quantizers]
    assert keywords["color"] == ["tab:red" if each.warnings else "tab:blue" for each in report.quantizers]
    assert "tab:red" in keywords["color"]
    ax = RecordingAxes()
    qt.health(calibrated()).plot("drift", ax=ax)
    assert [args for args, _ in ax.calls_of("text")] == [(0, row, " no data") for row in range(4)]
    assert ax.calls_of("set_xlabel") == [(("current scale / first scale",), {})]


def test_an_unknown_metric_is_rejected():
    with pytest.raises(dt.SpecError, match=r"unknown metric 'clip_fractions': did you mean 'clip_fraction'\?"):
        clipping_report().plot("clip_fractions", ax=RecordingAxes())


def test_plots_without_matplotlib_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for result in (qt.plan(small(), "w8a8"), clipping_report()):
        with pytest.raises(dt.UnsupportedError, match="install matplotlib: pip install"):
            result.plot()


def test_plots_on_real_axes():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    for result in (qt.plan(small(), RECIPE), clipping_report()):
        ax = result.plot()
        assert len(ax.get_yticklabels()) == len(
            result.layers if isinstance(result, qt.ModelPlan) else result.quantizers
        )
        ax.figure.canvas.draw()
        pyplot.close(ax.figure)
