"""The include check finds what it is there to find."""

import pathlib
import tempfile
import unittest

import check_includes


def violations(path: str, text: str) -> list[str]:
    return check_includes.violations({path: text}, exceptions={})


class Includes(unittest.TestCase):
    def allows(self, path: str, name: str) -> None:
        self.assertEqual(violations(path, f'#include "{name}"\n'), [])

    def refuses(self, path: str, name: str) -> None:
        self.assertEqual(violations(path, f'#include "{name}"\n'),
                         [f"{path}: must not include {name}"])

    def test_public_headers_need_the_standard_library_alone(self) -> None:
        self.allows("include/flashdsa/indexer.h", "vector")
        self.allows("include/flashdsa/indexer.h", "flashdsa/runtime.h")
        self.refuses("include/flashdsa/indexer.h", "fmt/format.h")
        self.refuses("include/flashdsa/indexer.h", "core/validate.h")
        self.refuses("include/flashdsa/indexer.h", "unistd.h")

    def test_core_knows_no_operation(self) -> None:
        self.allows("src/core/validate.cc", "core/validate.h")
        self.refuses("src/core/validate.cc", "indexer/params.h")
        self.refuses("src/core/validate.cc", "hwy/highway.h")

    def test_operations_meet_through_public_headers(self) -> None:
        self.allows("src/attention/attention.cc", "flashdsa/selection.h")
        self.allows("src/attention/attention.cc", "attention/params.h")
        self.refuses("src/attention/attention.cc", "selection/params.h")
        self.refuses("src/attention/attention.cc", "attention/cpu/kernels.h")

    def test_the_reference_shares_nothing_with_what_it_judges(self) -> None:
        self.allows("src/indexer/reference/topk.cc", "indexer/params.h")
        self.allows("src/indexer/reference/topk.cc", "core/parallel.h")
        self.refuses("src/indexer/reference/topk.cc", "indexer/cpu/kernels.h")
        self.refuses("src/indexer/reference/topk.cc", "core/validate.h")
        self.refuses("src/indexer/reference/topk.cc", "attention/params.h")

    def test_cpu_backends_do_not_reach_the_reference(self) -> None:
        self.allows("src/indexer/cpu/kernels.cc", "hwy/highway.h")
        self.refuses("src/indexer/cpu/topk.cc", "indexer/reference/topk.h")
        self.refuses("src/indexer/cpu/topk.cc", "attention/cpu/kernels.h")

    def test_cuda_stays_in_its_folders(self) -> None:
        self.allows("src/core/cuda/check.h", "cuda_runtime_api.h")
        self.allows("src/indexer/sm90/launch.cu", "core/cuda/ptx.cuh")
        self.allows("src/indexer/sm90/launch.cu", "cute/tensor.hpp")
        self.allows("src/indexer/sm90/launch.cu", "indexer/sm90/config.h")
        self.refuses("src/indexer/sm90/launch.cu", "indexer/sm80/config.h")
        self.refuses("src/indexer/sm90/launch.cu", "indexer/cpu/kernels.h")
        self.refuses("src/core/scratch.cc", "cuda_runtime_api.h")
        self.refuses("src/core/scratch.cc", "core/cuda/check.h")
        self.refuses("src/indexer/cpu/topk.cc", "core/cuda/check.h")

    def test_the_command_uses_the_public_headers(self) -> None:
        self.allows("tools/topk.cc", "CLI/CLI.hpp")
        self.refuses("tools/topk.cc", "core/parallel.h")
        self.refuses("bench/indexer.cc", "indexer/params.h")

    def test_a_macro_name_is_refused_where_names_are_checked(self) -> None:
        self.assertEqual(violations("src/core/a.cc", "#include HEADER\n"),
                         ["src/core/a.cc: must not include HEADER"])

    def test_spacing_does_not_hide_an_include(self) -> None:
        self.assertEqual(violations("src/core/a.cc", "  #  include<indexer/params.h> // why\n"),
                         ["src/core/a.cc: must not include indexer/params.h"])

    def test_a_folder_without_a_rule_is_an_error(self) -> None:
        self.assertEqual(violations("src/new/deep/er/a.cc", "#include <vector>\n"),
                         ["src/new/deep/er/a.cc: no rule says what this folder may include"])

    def test_exceptions_hold_for_one_file_and_must_be_used(self) -> None:
        exceptions = {("src/core/a.cc", "omp.h"): "threads"}
        text = "#include <omp.h>\n"
        self.assertEqual(check_includes.violations({"src/core/a.cc": text}, exceptions), [])
        self.assertEqual(check_includes.violations({"src/core/b.cc": text}, exceptions),
                         ["src/core/b.cc: must not include omp.h",
                          "src/core/a.cc: the exception for omp.h is not used"])

    def test_the_tree_is_read_by_suffix(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("src/core/a.cc", "tools/b.h", "src/core/notes.md"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("#include <vector>\n")
            self.assertEqual(sorted(check_includes.read_tree(root)), ["src/core/a.cc", "tools/b.h"])


if __name__ == "__main__":
    unittest.main()
