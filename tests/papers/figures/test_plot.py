"""Figures that show what may be believed, in the published look: artists as they are on the axes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.core import method
from papers.figures import case, case_files, plot
from papers.figures.point import FigureRow


def drawn(number: int, rows: list[FigureRow]):
    """The axes of ours and of the published."""
    return case.load_case(number).figure([*rows, *case.published_rows(number)], "profile demo").axes


def measured_rows(metric: str = "params", **changes) -> list[FigureRow]:
    row = FigureRow(metric, "l2l", 4, 128, None, 1e6, valid=True, machine="some CPU", clock="sim")
    return [dataclasses.replace(row, **changes)]


def test_a_table_of_before_rows_knew_whether_they_are_judged_is_read_as_judged(tmp_path: Path) -> None:
    lines = {
        name: str(getattr(measured_rows()[0], name)) for name in case_files.COLUMNS if name != "is_judged"
    }
    lines |= {name: "" for name, value in vars(measured_rows()[0]).items() if value in (None, ())} | {
        "profile": "demo"
    }
    lines = {name: text for name, text in lines.items() if name != "values"}
    (tmp_path / "old.csv").write_text(f"{','.join(lines)}\n{','.join(lines.values())}\n")
    unchecked = measured_rows(valid=False, reason=case_files.EDITED)
    assert case_files.read_csv(tmp_path / "old.csv") == (unchecked, {"demo"})


def test_a_bar_is_filled_only_where_the_gate_passed() -> None:
    for valid in (True, False):
        (bar,) = drawn(1, measured_rows(valid=valid))[0].patches
        assert (bar.get_facecolor()[3] > 0) == valid


def test_a_point_of_a_line_is_filled_only_where_the_gate_passed() -> None:
    rows = [*measured_rows("step_seconds", method="stronghold", window_size=2)]
    rows += [dataclasses.replace(rows[0], num_layers=6, valid=False)]
    _, first, second = drawn(4, rows)[0].lines
    assert (first.get_markerfacecolor(), second.get_markerfacecolor()) == ("#A05CFF", "white")


LINES = {"L2L": ("l2l", 2e-3), "STRONGHOLD, window 2": ("stronghold", 1.5), "Resident": ("resident", 4e-3)}


def drawn_lines(metric: str, *rows: FigureRow) -> plot.Figure:
    """A figure of LINES: a value for each layer, at 4, 8 and, of the first one, 16 layers; and these rows."""
    for name, factor in LINES.values():
        depths = (4, 8, 16) if name == "l2l" else (4, 8)
        rows += tuple(
            row for n in depths for row in measured_rows(metric, method=name, num_layers=n, value=factor * n)
        )

    def draw(axes: plot.Axes, part: list[FigureRow]) -> None:
        for label, (name, _) in LINES.items():
            plot.line(axes, [(row.num_layers, row) for row in part if row.method == name], label)

    figure = plot.figure(rows, metric, draw, "demo", is_line=True)
    figure.draw_without_rendering()
    return figure


def test_every_line_of_a_panel_is_seen_whole() -> None:
    axes = drawn_lines("step_seconds").axes[0]
    lines = {line.get_label(): line for line in axes.lines if line.get_label() in LINES}
    low, high = axes.get_ylim()
    for label, (name, line) in LINES.items():
        depths = [4, 8, 16] if name == "l2l" else [4, 8]
        assert list(lines[label].get_xdata()) == depths
        assert list(lines[label].get_ydata()) == pytest.approx([1e3 * line * depth for depth in depths])
        assert low == 0 < max(lines[label].get_ydata()) < high
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4", "8", "16"]


def test_lines_of_a_panel_have_one_unit() -> None:
    axes = drawn_lines("params", *measured_rows(method="resident", num_layers=2, value=5e9)).axes[0]
    assert axes.get_ylabel() == "Parameters (billions)"
    assert max(max(line.get_ydata()) for line in axes.lines if line.get_label() == "L2L") == pytest.approx(
        3.2e-11
    )


def test_a_legend_covers_no_line() -> None:
    axes = drawn_lines("step_seconds").axes[0]
    box = axes.get_legend().get_window_extent()
    for line in axes.lines:
        assert not axes.transData.transform_path(line.get_path()).intersects_bbox(box, filled=False)


def test_crosses_below_lines_say_whose_they_are() -> None:
    failed = [
        measured_rows("step_seconds", method=name, num_layers=16, value=None, status="oom-host", valid=False)[
            0
        ]
        for name in ("stronghold", "resident")
    ]
    axes = drawn_lines("step_seconds", *failed).axes[0]
    crosses = [(line.get_color(), line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "x"]
    assert [color for color, _ in crosses] == [method.load(row.method).color for row in failed]
    assert len({height for _, height in crosses}) == 2
    assert [text.get_text() for text in axes.texts] == ["STRONGHOLD, window 2", "Resident"]


def test_nothing_published_has_no_panel() -> None:
    assert [axes.get_title(loc="left") for axes in drawn_lines("step_seconds").axes] == ["measured, demo"]


def test_a_size_that_failed_is_a_cross_and_no_bar() -> None:
    axes = drawn(1, measured_rows(status="oom-device", valid=False))[0]
    assert len(axes.patches) == 0
    assert [(line.get_marker(), line.get_ydata()[0]) for line in axes.lines] == [("x", 1.0)]


def test_the_number_of_a_bar_stands_inside_of_it_where_a_larger_size_failed() -> None:
    failed = measured_rows(status="oom-device", valid=False, value=1.2e6)
    texts = list(drawn(1, measured_rows() + failed)[0].texts)
    assert [text.get_text() for text in texts] == ["1.00"] and texts[0].get_position()[1] < 1
    (alone,) = drawn(1, failed)[0].texts
    assert (alone.get_text(), alone.get_color()) == ("1.20", plot.CROSS) and alone.get_position()[1] > 1.2


def test_a_search_that_is_not_finished_is_told_on_the_bar_and_below() -> None:
    rows = measured_rows(is_final=False)
    assert [text.get_text() for text in drawn(1, rows)[0].texts] == ["\N{GREATER-THAN OR EQUAL TO} 1.00"]
    assert "L2L: search not finished" in plot.caption(rows, [], "")
    assert "search not finished" not in plot.caption(measured_rows(), [], "")


def test_the_small_line_tells_the_worst_scatter_of_times_without_an_interval() -> None:
    rows = [*measured_rows("step_seconds", scatter=0.32), *measured_rows("step_seconds", scatter=0.1)]
    assert "steps scatter up to 32%" in plot.caption(rows, [], "")
    assert "scatter" not in plot.caption(
        measured_rows("step_seconds", scatter=0.32, low=1.0, high=2.0, num_runs=3), [], ""
    )


def speeds(**changes) -> list[FigureRow]:
    """One bar of case 3: STRONGHOLD, six timed steps on idle cores."""
    six = {"value": 2.0, "num_steps": 6, "steps": (1.0, 1.5, 2.0, 2.0, 2.5, 3.0), "load": 0.5, "num_cores": 2}
    return measured_rows("samples_per_second", **{"method": "stronghold", **six, **changes})


def test_each_timed_step_of_a_bar_is_a_dot() -> None:
    axes = drawn(3, speeds())[0]
    (dots,) = [marks for marks in axes.collections if marks.get_gid() == plot.STEP_DOTS_ID]
    assert dots.get_offsets()[:, 1].tolist() == [1.0, 1.5, 2.0, 2.0, 2.5, 3.0]
    # above the highest dot
    assert axes.texts[-1].get_text() == "2.00" and axes.texts[-1].get_position()[1] > 3.0


@pytest.mark.parametrize(
    ("changes", "doubts"),
    [
        ({}, []),
        ({"num_steps": 5, "load": 2.0}, []),
        ({"num_steps": 4}, ["4 steps"]),
        ({"load": 2.1}, ["load 2.1"]),
        ({"num_steps": 1, "load": 5.0}, ["1 step", "load 5"]),
        ({"num_steps": None, "load": None}, []),  # not timed, as a size
    ],
)
def test_a_bar_of_few_steps_or_of_busy_cores_is_hatched_and_says_so(changes: dict, doubts: list[str]) -> None:
    rows = speeds(**changes)
    axes = drawn(3, rows)[0]
    assert [bar.get_hatch() for bar in axes.patches] == [plot.DOUBT_HATCH if doubts else None]
    assert [text.get_text() for text in axes.texts[:-1]] == (["\n".join(doubts)] if doubts else [])
    assert ("doubtful time" in plot.caption(rows, [], "")) == bool(doubts)


def test_placement_and_clipping_stand_under_a_bar() -> None:
    under = drawn(3, speeds(placement="R1W3", clipping="deferred"))[0].texts[0]
    assert under.get_text() == "R1W3\ndeferred" and under.get_position()[1] < 0


def test_fonts_of_a_pdf_are_embedded_as_type_42(tmp_path: Path) -> None:
    pdf, _ = plot.save(case.load_case(3).figure(speeds(), "profile demo"), tmp_path / "figure")
    assert b"/CIDFontType2" in pdf.read_bytes() and b"/Type3" not in pdf.read_bytes()


def test_a_page_tells_the_small_print_below_the_figure() -> None:
    figure = case.load_case(3).figure([*speeds(), *case.published_rows(3)], "profile demo")
    svg, texts = plot.svg(figure), plot.notes(figure)
    assert svg == plot.svg(figure) and len(svg) < len(_svg_with_small_print(figure))
    assert texts[0].startswith("measured: profile demo; some CPU") and texts[-1].startswith("published: V100")


def _svg_with_small_print(figure: plot.Figure) -> str:
    for text in figure.texts:
        text.set_gid(None)
    return plot.svg(figure)


def test_numbers_of_a_panel_have_equally_many_digits() -> None:
    assert [plot.number(value) for value in (0.5, 0.571, 1, 12.25, 123, 999.4, 999.6, 7935.2)] == [
        "0.500",
        "0.571",
        "1.00",
        "12.2",
        "123",
        "999",
        "1000",
        "7935",
    ]


def test_each_pair_of_case_2_says_its_layers() -> None:
    rows = [*speeds(method="l2l", num_layers=7), *speeds(num_layers=7)]
    names = [[text.get_text() for text in axes.get_xticklabels()] for axes in drawn(2, rows)]
    assert names[0][1] == "L2L\n7 layers" and names[1][1] == "L2L\n78 layers"


def test_published_bars_are_hatched_and_ours_are_not() -> None:
    left, right = drawn(1, measured_rows())
    assert {bar.get_hatch() for bar in left.patches} == {None}
    assert {bar.get_hatch() for bar in right.patches} == {"////"}


def test_an_error_bar_is_the_rows_interval_or_not_there() -> None:
    assert not drawn(1, measured_rows())[0].containers[0].errorbar
    axes = drawn(1, measured_rows(low=0.8e6, high=1.4e6, num_runs=3))[0]
    (segment,) = axes.collections[0].get_segments()
    assert segment[:, 1] == pytest.approx([0.8, 1.4])


def test_panels_share_a_scale_only_for_the_same_widths_by_the_same_clock() -> None:
    left, right = drawn(1, measured_rows())
    assert left.get_ylim() != right.get_ylim()
    left, right = drawn(1, measured_rows(hidden_size=2048, clock="cuda", value=1e9))
    assert left.get_ylim() == right.get_ylim()


def test_the_small_line_tells_machine_clock_profile_window_and_what_error_bars_are() -> None:
    rows = measured_rows(window_size=2, low=0.8e6, high=1.4e6, num_runs=3)
    text = plot.caption(rows, case.published_rows(3), "profile demo")
    for part in (
        "some CPU",
        "clock sim",
        "profile demo",
        "window 2",
        "median of 3",
        "95 % interval",
        "V100",
        "window 15",
    ):
        assert part in text
    assert "gate not passed: L2L: loss differs" in plot.caption(
        measured_rows(valid=False, reason="loss differs"), [], ""
    )


def test_the_axes_have_one_spelling_of_each_metric() -> None:
    labels = [axes.get_ylabel() for number in range(1, 6) for axes in drawn(number, [])[1:]]
    assert labels == [
        "Parameters (billions)",
        "Throughput (samples/s)",
        "Throughput (samples/s)",
        "Step time (ms)",
        "Step time (ms)",
    ]
    ticks = [text.get_text() for text in drawn(1, [])[1].get_xticklabels()]
    assert ticks == ["Megatron-LM", "L2L", "ZeRO-Offload", "ZeRO-Infinity", "STRONGHOLD"]
