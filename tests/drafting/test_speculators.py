"""Exported drafters load in the classes of the `speculators` package, and what these save is read back."""

import numpy as np
import published_files as published
import pytest
from safetensors.numpy import load_file
from test_checkpoints import assert_same
from test_export import tree

from spec_jax.drafting.checkpoints import read_drafter
from spec_jax.drafting.export import default_tables, export_drafter, export_model

TARGET = published.target()
NAMES = ["eagle3", *(name for name in published.ALL if name.startswith("speculators")), "peagle", "dflash"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the other package
@pytest.mark.parametrize("name", NAMES)
def test_speculators_reads_what_is_written_and_writes_what_is_read(name, tmp_path):
    speculators = pytest.importorskip("speculators")
    drafter, target = published.ALL[name](), tmp_path / "target"
    export_model(TARGET.config, TARGET.params, target)
    options = {"target_name": str(target), "target_config": TARGET.config, "target_params": TARGET.params}
    options["tables"] = default_tables(drafter.head, "speculators", "float32")
    export_drafter(drafter.head, tree(drafter.expected), tmp_path / "ours", **options)
    model = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "ours"))
    held = model.state_dict()
    for tensor, array in load_file(tmp_path / "ours" / "model.safetensors").items():
        np.testing.assert_array_equal(held[tensor].numpy(), array, err_msg=tensor)
    model.save_pretrained(str(tmp_path / "theirs"))
    head, params, _ = read_drafter(tmp_path / "theirs", TARGET)
    if not drafter.head.own_embedding and head.own_embedding:  # they store a copy of the target's
        np.testing.assert_array_equal(params.pop("embedding"), TARGET.params["embedding"])
    else:
        assert head == drafter.head
    assert_same(params, drafter.expected)
