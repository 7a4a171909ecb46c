"""The conformance cases through the package, judged by the NumPy oracle as the command is.

Left out are the cases about the command itself: its options, and files that cannot be read.
"""

import importlib.util

import pytest

import package_program
import run_cases
import safetensors_io as st

CASES = {case["name"]: case for case in run_cases.load_cases(run_cases.DEFAULT_CASES)}
OPERATIONS = ("metadata", "topk", "attend", "run")


def is_readable(case):
    try:
        st.read(run_cases.DEFAULT_CASES / case["input"])
    except st.BadFile:
        return False
    return True


def is_about_operations(case):
    return (case.get("argv") is None and case["op"] in OPERATIONS
            and (case["group"] in OPERATIONS or is_readable(case)))


SELECTED = [name for name, case in CASES.items() if is_about_operations(case)]


def test_all_cases_of_the_operations_are_there():
    assert len(SELECTED) >= sum(case["group"] in OPERATIONS for case in CASES.values()) >= 282


@pytest.fixture(scope="module", params=["numpy", "torch"])
def program(request):
    if request.param == "numpy":
        return package_program.program(package_program.NumpyTensors())
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch")
    return package_program.program(package_program.TorchTensors("cpu"))


@pytest.fixture(scope="module", params=["cpu", "reference"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def outputs(program, backend):
    """Results of the cases so far, which others must repeat."""
    return {}


def problems_of(name, program, backend, outputs, folder):
    return run_cases.run_case(CASES[name], run_cases.DEFAULT_CASES, folder, program, backend, True,
                              outputs)


@pytest.mark.parametrize("name", SELECTED)
def test_case(name, program, backend, outputs, tmp_path):
    assert problems_of(name, program, backend, outputs, tmp_path) == []


@pytest.mark.cuda
def test_cases_on_a_gpu(tmp_path):
    program, outputs = package_program.program(package_program.TorchTensors("cuda")), {}
    problems = {name: problems_of(name, program, "sm90", outputs, tmp_path) for name in SELECTED}
    assert {name: found for name, found in problems.items() if found} == {}
