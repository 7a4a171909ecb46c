"""The check of figures finds what it is there to find."""

import unittest

import check_figures

ROW = {"op": "topk", "workload": "random", "heads": 8, "index_heads": 32, "t_q": 100,
       "median_ms": 1.2345, "tflops": 0.148,
       "ceiling_share": 0.2184, "scratch_bytes": 1 << 20, "error": "out rmse 2.04e-03 / 4.0e-03"}
TITLES = ("operation", "H", "median, ms", "GFLOP/s", "share of the peak", "scratch", "error",
          "bound", "H_index", "us a token", "G")
CELLS = ("top-k", "8", "1.23", "148", "21.8 %", "1.0 MiB", "2.0e-3", "4e-3", "32",
         "12.35", "4")


def page(titles: tuple[str, ...], *lines: tuple[str, ...]) -> str:
    rule = ("---",) * len(titles)
    return "before\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, rule, *lines))


class Figures(unittest.TestCase):
    def faults(self, text: str) -> list[str]:
        return check_figures.faults_of("a.md", text, [{"op": "metadata"}, ROW])

    def test_a_line_with_its_row_passes(self) -> None:
        self.assertEqual(self.faults(page(TITLES, CELLS)), [])

    def test_a_figure_that_may_be_left_out_passes(self) -> None:
        self.assertEqual(self.faults(page(("median", "peer, ms"), ("1.2 ms", ""))), [])

    def test_every_wrong_cell_is_found(self) -> None:
        wrong = ("forward", "16", "1.24", "149", "21.9 %", "1.1 MiB", "2.1e-3", "5e-3",
                 "64", "12.36")
        for position, cell in enumerate(wrong):
            line = (*CELLS[:position], cell, *CELLS[position + 1:])
            with self.subTest(cell):
                self.assertEqual(self.faults(page(TITLES, CELLS, line)), [
                    f"a.md: no row of bench/results agrees with {' | '.join(line)}"])

    def test_a_figure_that_no_row_has_is_found(self) -> None:
        self.assertEqual(self.faults(page(("median, ms", "ratio"), ("1.23", "1.04"))),
                         ["a.md: no row of bench/results agrees with 1.23 | 1.04"])

    def test_a_column_of_unknown_meaning_is_found(self) -> None:
        self.assertEqual(self.faults(page(("median, ms", "joules"), ("1.23", "5"))),
                         ["a.md: no field of a row is known as joules"])

    def test_other_tables_and_generated_ones_are_not_looked_at(self) -> None:
        self.assertEqual(self.faults(page(("what", "bytes"), ("x", "5"))), [])
        generated = page(("median, ms", "joules"), ("9", "9"))
        self.assertEqual(self.faults(f"<!-- table: a -->\n{generated}<!-- end of table -->"), [])


if __name__ == "__main__":
    unittest.main()
