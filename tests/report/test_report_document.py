"""Reports as JSON, HTML and text: round trips, and errors for files that are not reports."""

import html
import json
import math
import re
from dataclasses import replace

import pytest
from report_models import EVIL, big_report, full_report

import detent.report as qr
from detent.codec import TEXT_LIMIT
from detent.errors import DtypeError, FileFormatError, SpecError, UnsupportedError


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return full_report(tmp_path_factory.mktemp("document"))


def test_json_comes_back(page):
    assert qr.Report.from_json(page.to_json()) == page


def test_figures_that_are_not_finite_come_back():
    layer = qr.Layer("a", "Conv", "integer", output_sqnr_db=math.inf)
    page = qr.Report("a", None, 8, (layer, replace(layer, name="b", output_sqnr_db=-math.inf)))
    text = page.to_json()
    assert "Infinity" not in text
    assert qr.Report.from_json(text) == page
    odd = qr.Report.from_json(qr.Report("a", None, 8, (replace(layer, output_sqnr_db=math.nan),)).to_json())
    assert math.isnan(odd.layers[0].output_sqnr_db)
    assert "∞" in page.to_html()


def change(page, edit):
    about = json.loads(page.to_json())
    edit(about)
    return json.dumps(about)


MALFORMED = {
    "not json": (lambda about: None, "is not valid JSON"),
    "another kind": (lambda about: about.update(kind="recipe"), "not a detent report"),
    "another version": (lambda about: about.update(version=9), "version 9"),
    "unknown key": (lambda about: about.update(extra=1), "unexpected keys ['extra']"),
    "missing key": (lambda about: about.pop("layers"), "missing keys ['layers']"),
    "layers no list": (lambda about: about.update(layers={}), "report.layers must be a list"),
    "text for bytes": (lambda about: about.update(nbytes_after="8"), "report.nbytes_after must be an integer"),
    "true for bytes": (lambda about: about.update(nbytes_after=True), "report.nbytes_after must be an integer"),
    "huge bytes": (lambda about: about.update(nbytes_after=1 << 70), "report.nbytes_after must be an integer"),
    "status": (lambda about: about["layers"][0].update(status="gone"), "report.layers[0].status must be one of"),
    "name": (lambda about: about["layers"][0].update(name=None), "report.layers[0].name must be text"),
    "number": (
        lambda about: about["layers"][0].update(noise_share="much"),
        "report.layers[0].noise_share must be a number",
    ),
    "nested": (
        lambda about: about["layers"][0]["weight"]["histogram"].update(counts=[1.5]),
        "report.layers[0].weight.histogram.counts[0] must be an integer",
    ),
    "too many bins": (
        lambda about: about["layers"][0]["weight"]["histogram"].update(counts=[1] * 65),
        "expected 1 to 64",
    ),
    "no width": (lambda about: about["layers"][0]["weight"]["histogram"].update(width=0), "width > 0"),
    "negative size": (lambda about: about["sizes"][0].update(nbytes=-1), "expected at least 0"),
    "noise share": (lambda about: about["layers"][0].update(noise_share=7), "a share from 0 to 1"),
    "nan noise share": (lambda about: about["layers"][0].update(noise_share="nan"), "a share from 0 to 1"),
    "half a character": (lambda about: about.update(title="\ud800"), "report.title must be text without lone"),
    "half a key": (lambda about: about["output_sqnr_db"].update({"\ud800": 1.0}), "must be text without lone"),
    "pair": (lambda about: about.update(facts=[["a"]]), "report.facts[0] must be a list of 2"),
    "ragged table": (lambda about: about["tables"][0]["rows"].append(["one"]), "has 1 cell, expected 2"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_json_is_rejected(page, name):
    edit, words = MALFORMED[name]
    text = "{" if name == "not json" else change(page, edit)
    with pytest.raises(FileFormatError) as caught:
        qr.Report.from_json(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is not valid JSON"),
        ('{"kind": 1, "kind": 2}', "duplicate keys"),
        ("[]", "expected a JSON object"),
        ('{"kind": "detent-report", "version": NaN}', "is not valid JSON"),
        (b"{}", "got bytes for the report, expected JSON text"),
    ],
    ids=["deep", "twice", "list", "nan", "bytes"],
)
def test_other_texts_are_rejected(text, words):
    with pytest.raises(FileFormatError) as caught:
        qr.Report.from_json(text)
    assert words in str(caught.value)


def test_text_that_is_too_large_is_rejected():
    with pytest.raises(FileFormatError, match=f"at most {TEXT_LIMIT}"):
        qr.Report.from_json(" " * (TEXT_LIMIT + 1))


def test_notebooks_show_reports_and_comparisons_as_tables(page):
    assert "\n" not in repr(page)
    text = page._repr_html_()
    assert text.count("<tr>") == 1 + len(page.layers)
    assert "small &amp; &lt;b&gt;bold" in text
    assert "<b>" not in text
    both = qr.compare(page, page)
    assert repr(both) == f"<Comparison of {page.title!r} and {page.title!r}: {len(page.layers)} layers>"
    assert both._repr_html_().count("<tr>") == 1 + len(page.layers)
    assert "<b>" not in both._repr_html_()


def test_files_of_both_kinds_come_back(page, tmp_path):
    for name in ("page.html", "page.json", "PAGE.HTML"):
        page.save(tmp_path / name)
        assert qr.Report.load(tmp_path / name) == page
    assert sorted(each.name for each in tmp_path.iterdir()) == ["PAGE.HTML", "page.html", "page.json"]


def test_other_files_are_rejected(tmp_path):
    (tmp_path / "a.html").write_text("<p>no report</p>")
    (tmp_path / "b.html").write_bytes(b"\xff\xfe")
    for path, words in (("a.html", "no report-data"), ("b.html", "UTF-8"), ("c.json", "cannot be read")):
        with pytest.raises(FileFormatError, match=words):
            qr.Report.load(tmp_path / path)
    with pytest.raises(FileFormatError, match="suffix"):
        qr.Report.load(tmp_path / "a.txt")


def test_a_failed_write_leaves_the_old_file(page, tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    target.write_text("old")
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        page.save(target)
    assert target.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_missing_jinja_is_one_line(page, monkeypatch):
    import sys

    from detent.report import html

    monkeypatch.setitem(sys.modules, "jinja2", None)
    html._environment.cache_clear()
    with pytest.raises(UnsupportedError) as caught:
        page.to_html()
    html._environment.cache_clear()
    assert str(caught.value) == "HTML reports need jinja2: pip install 'detent[report]'"
    assert page.to_json()


def test_import_is_light():
    import subprocess
    import sys

    code = "import detent.report, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "detent" in modules
    assert not {"torch", "onnx", "onnxruntime", "jinja2"} & set(modules)


# HTML


def test_everything_is_escaped(page):
    layer = replace(page.layers[0], name=EVIL, type=EVIL, kernel=EVIL, reason=EVIL, note=EVIL)
    hostile = replace(
        page,
        title=EVIL,
        layers=(layer,),
        facts=((EVIL, EVIL),),
        tables=(qr.Table(EVIL, (EVIL,), ((EVIL,),)),),
        notes=(EVIL,),
        steps=(EVIL,),
        reproduction=replace(page.reproduction, recipe=EVIL, recipe_toml=EVIL, command=EVIL, versions={EVIL: EVIL}),
    )
    for text in (hostile.to_html(), qr.compare(hostile, hostile).to_html()):
        assert text.count("<script") == 2
        assert text.count("</script>") == 2
        assert "<img" not in text
        assert "onerror=alert(1)>" not in text
    assert qr.Report.from_json(hostile.to_json()) == hostile


def test_the_page_asks_nobody(page):
    text = replace(page, verification=None).to_html()
    assert "default-src 'none'" in html.unescape(text)
    for word in ("http://", "https://", "@import", "url(", "<link", "src=", "style="):
        assert word not in text.replace("http://www.w3.org/2000/svg", ""), word


def test_a_large_page_is_small_enough():
    assert len(big_report(200).to_html().encode()) < 2_000_000


def test_the_page_has_its_parts(page):
    text = page.to_html()
    for part in ("summary", "layers", "size", "sensitivity", "verification", "reproduce"):
        assert f'<section id="{part}"' in text
    assert "12,345 codes compared, none differ" in text.replace("\n", " ")
    assert "small &amp; &lt;b&gt;bold&lt;/b&gt;" in text
    bare = qr.Report("bare", None, 8).to_html()
    assert '<section id="verification"' not in bare
    assert '<section id="sensitivity"' not in bare


def test_tables_check_their_rows():
    with pytest.raises(SpecError, match="row 1 of table 'A' has 1 cell,"):
        qr.Table("A", ("a", "b"), (("1", "2"), ("3",)))


# Two reports


def test_comparison(page):
    other = replace(
        page,
        title="other",
        nbytes_after=page.nbytes_after - 100,
        layers=tuple(
            replace(layer, output_sqnr_db=layer.output_sqnr_db - 2, nbytes=layer.nbytes + 1, kernel="other")
            for layer in page.layers[:2]
        ),
    )
    both = qr.compare(page, other)
    assert [each.name for each in both.layers] == [layer.name for layer in page.layers]
    first, last = both.layers[0], both.layers[-1]
    assert first.sqnr_change_db == pytest.approx(-2)
    assert first.nbytes_change == 1
    assert first.is_changed
    assert last.b is None
    assert last.sqnr_change_db is None
    assert "(-100)" in str(both)
    assert "absent" in str(both)
    about = json.loads(both.to_json())
    assert about["layers"][0]["sqnr_change_db"] == pytest.approx(-2)
    assert about["layers"][-1]["b"] is None
    assert "absent" in both.to_html()


def test_other_codes_are_a_change(page):
    """Two files may have the same spec, one of them with 4-bit codes in bytes."""
    layer = page.layers[0]
    narrow = replace(layer.weight, code_low=-7, code_high=7, digest="0" * 64)
    both = qr.compare(page, replace(page, layers=(replace(layer, weight=narrow), *page.layers[1:])))
    assert [each.is_changed for each in both.layers] == [True, *(False for _ in page.layers[1:])]
    assert "codes -7..7" in str(both)
    assert "codes -7..7" in both.to_html()
    unknown = replace(layer.weight, digest="")
    assert not qr.compare(page, replace(page, layers=(replace(layer, weight=unknown),))).layers[0].is_changed


def test_reports_without_a_common_layer(page):
    other = replace(page, layers=tuple(replace(layer, name=f"other {layer.name}") for layer in page.layers))
    both = qr.compare(page, other)
    assert not both.has_common_layers
    assert str(both).splitlines()[2] == "the two models share no layer names: were both made from the same float model?"
    assert "share no layer names" in both.to_html()
    assert not json.loads(both.to_json())["has_common_layers"]
    assert "in common" not in qr.compare(page, page).to_html()
    assert qr.compare(page, replace(page, layers=())).has_common_layers


def summary_rows(html):
    return re.findall(r'<th scope="row">([^<]*)</th><td class="num" data-label', html)


def test_comparison_leaves_out_unknown_metrics(page):
    everything = ["Size", "Output SQNR", "Top-1 agreement", "Layers quantized", "Layers on integer kernels", "Recipe"]
    with_agreement = replace(page, agreement=0.5)
    assert summary_rows(qr.compare(with_agreement, page).to_html()) == [*everything, "Verified"]
    bare = qr.Report("bare", None, 8)
    assert summary_rows(qr.compare(bare, bare).to_html()) == ["Size", "Layers quantized", "Layers on integer kernels"]


def test_the_worst_output_is_the_one_that_counts(page):
    several = replace(page, output_sqnr_db={"a": 40.0, "b": 12.5, "c": math.inf})
    assert (several.worst_output, several.sqnr_db) == ("b", 12.5)
    text = several.to_html()
    assert '<span class="big">12.5 dB</span><span class="note">worst output b, compared with ' in text
    assert "12.5 dB" in str(several)
    assert replace(page, output_sqnr_db={"a": 1.0, "b": math.nan}).worst_output == "b"
    assert replace(page, output_sqnr_db={}).sqnr_db is None


def test_codes_changed_by_accumulation_order_do_not_count_as_differences(page):
    """End to end, codes may differ; verification compares parts that get the same input."""
    text = page.to_html()
    assert "12,345 codes compared, none differ" in text.partition("<dt>Verified</dt>")[2][:200]
    runs = text.partition("<h3>End to end</h3>")[2].partition("</table>")[0]
    assert "Codes changed by accumulation order" in runs
    assert "Codes that differ" not in runs


def test_a_report_is_like_itself(page):
    both = qr.compare(page, page)
    assert not any(each.is_changed for each in both.layers)
    assert {each.sqnr_change_db for each in both.layers} == {0.0}


def test_infinite_figures_have_no_change():
    a, b = (qr.Report("a", None, 1, (qr.Layer("x", "Conv", "float", output_sqnr_db=db),)) for db in (math.inf, 3.0))
    assert qr.compare(a, b).layers[0].sqnr_change_db is None
    assert qr.compare(a, a).layers[0].sqnr_change_db == 0.0
    json.loads(qr.compare(a, b).to_json())
    best, good = (qr.Report("a", None, 1, output_sqnr_db={"y": db}) for db in (math.inf, 30.0))
    assert qr.compare(best, best).sqnr_change_db == 0.0
    assert qr.compare(good, best).sqnr_change_db is None
    assert qr.compare(good, good).sqnr_change_db == 0.0
    assert "nan" not in qr.compare(best, best).to_html().partition("<script")[0]


def test_comparison_rejects_other_types(page, tmp_path):
    with pytest.raises(DtypeError, match="got str, expected two reports"):
        qr.compare(page, "page.json")
    qr.compare(page, page).save(tmp_path / "both.html")
    qr.compare(page, page).save(tmp_path / "both.json")
    assert json.loads((tmp_path / "both.json").read_text())["kind"] == "detent-comparison"
