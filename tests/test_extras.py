"""Without an optional library, the error is the command that installs it."""

import subprocess
import sys

import pytest

MISSING = [
    ("transformers", "import bayesify.integrations.huggingface", "needs transformers: pip install 'bayesify[hf]'"),
    ("accelerate", "import bayesify.integrations.huggingface", "needs accelerate: pip install 'bayesify[hf]'"),
    (
        "timm",
        "from bayesify.integrations.vision import create_bayesian; create_bayesian('timm/resnet18')",
        "needs timm: pip install 'bayesify[vision]'",
    ),
    (
        "torchvision",
        "from bayesify.integrations.vision import create_bayesian; create_bayesian('torchvision/resnet18')",
        "needs torchvision: pip install 'bayesify[vision]'",
    ),
]


@pytest.mark.parametrize(("library", "code", "message"), MISSING, ids=[m[0] for m in MISSING])
def test_a_missing_library_says_the_pip_command(library, code, message):
    hidden = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {library!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
{code}
"""
    found = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert found.stderr.strip().splitlines()[-1].endswith(message), found.stderr


def test_other_missing_modules_are_told_as_they_are():
    from bayesify.integrations.extras import extra

    with pytest.raises(ModuleNotFoundError, match="nowhere"), extra("bayesify[hf]", "transformers"):
        import nowhere  # noqa: F401
