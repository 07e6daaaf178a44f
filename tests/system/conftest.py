"""The sandboxes that the tests of code rewards share."""

import os
import tempfile

import pytest
from code_sandboxes import LIMITS
from processes import children

from torchtune_grpo.sandbox.code import CodeSandbox

FENCES = ["namespaces", "landlock"]


@pytest.fixture(scope="module", params=FENCES)
def sandbox(request, tmp_path_factory):
    """Share one sandbox among all programs, so that one of them could harm the next."""
    tmp_path_factory.getbasetemp()  # which pytest would make in the folder below
    folder, before = tempfile.mkdtemp(), tempfile.tempdir
    os.chmod(folder, 0o755)  # as /tmp is
    tempfile.tempdir, processes = folder, set(children())
    sandbox = CodeSandbox(LIMITS, namespaces=request.param == "namespaces")
    if request.param == "namespaces" and "of their own" not in sandbox.confinement():
        pytest.skip("the kernel refuses namespaces here")
    yield sandbox
    sandbox.close()
    tempfile.tempdir = before
    assert not set(children()) - processes  # of those, some may have ended
    os.rmdir(folder)  # it is empty
