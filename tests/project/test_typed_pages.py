"""`make types` checks the examples of the pages."""

from typed_pages import check, module


def test_a_wrong_line_of_a_page_is_reported_where_it_stands(tmp_path):
    page = tmp_path / "numbers.md"
    lines = [
        "Text.",
        "",
        "```python",
        ">>> x = len(['a'])",
        ">>> def twice(n):",
        "...     return n * len(3)",
        ">>> x.shape",
        "1",
    ]
    page.write_text("\n".join([*lines, "```", ""]))
    assert [i for i, line in enumerate(module(page).splitlines(), 1) if line] == [4, 5, 6, 7]
    code, report = check(tmp_path / "made", [page])
    assert code == 1
    assert "page_numbers.py:6: error: Argument 1" in report  # in a function without annotations
    assert 'page_numbers.py:7: error: "int" has no attribute "shape"' in report
    assert "2 errors" in report
