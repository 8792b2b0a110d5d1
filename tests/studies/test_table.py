from __future__ import annotations

import csv
import io

from calibeam.studies import table

HOSTILE = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", '=HYPERLINK("x")']


def test_fault_54_no_text_is_a_formula_in_a_spreadsheet() -> None:
    printed = table.as_csv([{"task": text, "value": -1.5} for text in HOSTILE])
    rows = [*csv.DictReader(io.StringIO(printed))]
    assert [row["task"] for row in rows] == ["'" + text for text in HOSTILE]
    assert {row["value"] for row in rows} == {"-1.5"}, "numbers stay numbers"


def test_no_text_is_markup() -> None:
    made = table.Table("<b>|", ["a|b", "<script>"], [["x\ny", "[1|2]"]], ["<i>"])
    lines = made.markdown().splitlines()
    assert lines[0] == "# &lt;b&gt;\\|"
    assert lines[2:5] == ["| a\\|b | &lt;script&gt; |", "| --- | --- |", "| x y | [1\\|2] |"]
    assert lines[6] == "&lt;i&gt;"


def test_a_table_turns_tasks_into_columns_and_leaves_out_empty_ones() -> None:
    records = [
        {"task": task, "row": row, "r_m": value, "r_m_low": value - 1, "r_m_high": value + 1}
        for task, row, value in (("a", "one", 1.0), ("a", "two", 2.0), ("b", "one", 3.0))
    ]
    records.append({"task": "all tasks", "row": "one", "delta": 1.234, "delta_low": -1.0, "delta_high": None, "p": 0.5})
    made = table.pivot("t", records, {"row": ""}, {"R_m": table.r_m, "paper": table.paper_rouge}, {"delta": table.delta})
    assert made.columns == ["", "a: R_m", "b: R_m", "delta"]
    assert made.rows == [
        ["one", "1.00 (0.00 … 2.00)", "3.00 (2.00 … 4.00)", "+1.23% (-1.00 … -)"],
        ["two", "2.00 (1.00 … 3.00)", "", ""],
    ]
