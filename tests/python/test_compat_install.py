"""flashdsa.nemo.install and flashdsa.compat.install, each in a process of its own, with packages
that this file makes up in the place of the real ones."""

import importlib.util
import re
import subprocess
import sys
import textwrap

import pytest

from conftest import ROOT

pytest.importorskip("torch")

MIGRATIONS = re.findall(r"```py\n(.*?)```",
                        (ROOT / "docs/migration.md").read_text(encoding="utf-8"), re.DOTALL)

TARGET = "nemo_automodel.components.models.glm_moe_dsa.kernels.cudnn_dsa"


def require_absent(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is not None:
            pytest.skip(f"{package} is installed")


def run(program, *folders):
    """Runs a program with `folders` on its path; it fails by an assertion."""
    paths = f"import sys; sys.path[:0] = {list(map(str, folders))}\n"
    result = subprocess.run([sys.executable, "-c", paths + textwrap.dedent(program)],
                            capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def automodel(tmp_path):
    """A package with the names of NeMo AutoModel: the module, and one that imports from it."""
    folder = "nemo_automodel/components/models/glm_moe_dsa"
    files = {f"{folder}/kernels/cudnn_dsa.py": """
        def cudnn_indexer_topk(): pass
        def cudnn_sparse_attention(): pass
        def is_cudnn_dsa_available(): return None
        def prepare_cudnn_dsa_packed_metadata(): pass
        class CudnnDsaPackedMetadata: pass
        """, f"{folder}/layers.py": """
        from .kernels.cudnn_dsa import cudnn_sparse_attention, is_cudnn_dsa_available as available
        from .kernels import cudnn_dsa
        OTHER = 5
        """}
    parts = f"{folder}/kernels".split("/")
    for depth in range(1, len(parts) + 1):
        files["/".join(parts[:depth]) + "/__init__.py"] = ""
    return write(tmp_path, files)


def test_nemo_before_the_model_is_imported(automodel):
    run(f"""
        import flashdsa.nemo
        flashdsa.nemo.install()
        from nemo_automodel.components.models.glm_moe_dsa import layers
        assert layers.cudnn_sparse_attention is flashdsa.nemo.cudnn_sparse_attention
        assert layers.available is flashdsa.nemo.is_cudnn_dsa_available
        assert layers.cudnn_dsa is flashdsa.nemo
        import {TARGET} as module
        assert module is flashdsa.nemo
        import nemo_automodel
        assert nemo_automodel.components.models.glm_moe_dsa.kernels.cudnn_dsa is flashdsa.nemo
        assert nemo_automodel.__file__.startswith({str(automodel)!r})
        flashdsa.nemo.install()
        assert sys.modules[{TARGET!r}] is flashdsa.nemo
        """, automodel)


def test_nemo_after_the_model_was_imported(automodel):
    run("""
        from nemo_automodel.components.models.glm_moe_dsa import layers
        import flashdsa.nemo
        assert layers.available() is None
        flashdsa.nemo.install()
        assert layers.cudnn_sparse_attention is flashdsa.nemo.cudnn_sparse_attention
        assert layers.available is flashdsa.nemo.is_cudnn_dsa_available
        from nemo_automodel.components.models.glm_moe_dsa.kernels import cudnn_dsa
        assert cudnn_dsa is flashdsa.nemo and layers.OTHER == 5
        """, automodel)


def test_nemo_without_automodel():
    require_absent("nemo_automodel")
    run(f"""
        import flashdsa.nemo
        flashdsa.nemo.install()
        from {TARGET} import prepare_cudnn_dsa_packed_metadata
        import {TARGET} as module
        import {TARGET}
        assert module is flashdsa.nemo
        assert nemo_automodel.components.models.glm_moe_dsa.kernels.cudnn_dsa is flashdsa.nemo
        import importlib.util
        assert importlib.util.find_spec("nemo_automodel.shared") is None
        try:
            import nemo_automodel.shared
        except ModuleNotFoundError:
            pass
        else:
            assert False
        """)


def test_nemo_without_automodel_that_appears_later(automodel):
    require_absent("nemo_automodel")
    run(f"""
        import flashdsa.nemo
        flashdsa.nemo.install()
        sys.path.insert(0, {str(automodel)!r})
        from nemo_automodel.components.models.glm_moe_dsa import layers
        assert layers.cudnn_dsa is flashdsa.nemo and layers.OTHER == 5
        """)


def test_nemo_with_an_automodel_that_cannot_be_imported(automodel):
    (automodel / "nemo_automodel/__init__.py").write_text("import no_such_package")
    run(f"""
        import flashdsa.nemo
        flashdsa.nemo.install()
        assert sys.modules[{TARGET!r}] is flashdsa.nemo
        try:
            import nemo_automodel
        except ModuleNotFoundError as error:
            assert "no_such_package" in str(error)
        else:
            assert False
        """, automodel)


@pytest.mark.parametrize("program", MIGRATIONS, ids=["install", "import", "compat"])
def test_documented_migration(program):
    require_absent("flash_mla", "cudnn")
    run(program)


def test_compat_where_nothing_is_installed():
    require_absent("flash_mla", "cudnn")
    run("""
        import flashdsa.compat
        names = ("flash_mla.flash_mla_sparse_fwd", "cudnn.DSA")
        assert flashdsa.compat.install() == names and flashdsa.compat.install() == names
        from flash_mla import flash_mla_sparse_fwd
        assert flash_mla_sparse_fwd is flashdsa.compat.flash_mla_sparse_fwd
        from cudnn import DSA
        import cudnn.DSA
        assert cudnn.DSA is DSA
        for name in ("compactify_wrapper", "indexer_forward_wrapper", "indexer_top_k_wrapper",
                     "local_to_global_wrapper", "sparse_attention_backward_wrapper"):
            assert getattr(DSA, name) is getattr(flashdsa.compat, name)
        assert not hasattr(DSA, "indexer_backward_wrapper")
        import importlib.util
        assert importlib.util.find_spec("flash_mla") and importlib.util.find_spec("cudnn")
        """)


@pytest.fixture
def installed(tmp_path):
    return write(tmp_path, {
        "flash_mla/__init__.py": "flash_mla_sparse_fwd = 'theirs'\nget_mla_metadata = 'theirs'",
        "cudnn/__init__.py": "DSA = 'theirs'\npygraph = 'theirs'",
    })


def test_compat_leaves_installed_packages_alone(installed):
    run("""
        import flashdsa.compat
        assert flashdsa.compat.install() == ()
        import cudnn, flash_mla
        assert flash_mla.flash_mla_sparse_fwd == cudnn.DSA == "theirs"
        """, installed)


def test_compat_takes_the_names_when_asked(installed):
    run("""
        import flashdsa.compat
        done = flashdsa.compat.install(override=True)
        assert done == ("flash_mla.flash_mla_sparse_fwd", "cudnn.DSA")
        import cudnn, flash_mla
        assert flash_mla.flash_mla_sparse_fwd is flashdsa.compat.flash_mla_sparse_fwd
        assert cudnn.DSA.compactify_wrapper is flashdsa.compat.compactify_wrapper
        assert flash_mla.get_mla_metadata == cudnn.pygraph == "theirs"
        """, installed)


def test_compat_adds_a_name_that_an_installed_package_lacks(installed):
    (installed / "cudnn/__init__.py").write_text("pygraph = 'theirs'")
    run("""
        import flashdsa.compat
        assert flashdsa.compat.install() == ("cudnn.DSA",)
        import cudnn
        assert cudnn.DSA.compactify_wrapper is flashdsa.compat.compactify_wrapper
        assert cudnn.pygraph == "theirs"
        """, installed)


def test_compat_leaves_a_package_alone_that_cannot_be_imported(installed):
    (installed / "flash_mla/__init__.py").write_text("import no_such_package")
    run("""
        import flashdsa.compat
        assert flashdsa.compat.install() == ()
        assert flashdsa.compat.install(override=True)[0] == "flash_mla.flash_mla_sparse_fwd"
        from flash_mla import flash_mla_sparse_fwd
        assert flash_mla_sparse_fwd is flashdsa.compat.flash_mla_sparse_fwd
        """, installed)
