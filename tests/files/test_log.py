"""Messages come once, from the first of several processes: before torch.distributed begins, by torchrun's RANK."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_qknorm import patch_model
from qknorm_tests.tables import sharp_model


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_logs(rank, begun, caplog, monkeypatch):
    monkeypatch.setenv("RANK", str(1 - rank if begun else rank or ""))  # empty is unset
    caplog.set_level("INFO", "hf_qknorm")
    if begun:
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        patch_model(sharp_model("llama"), "qk_norm")
    finally:
        if begun:
            dist.destroy_process_group()
    assert len(caplog.records) == (rank == 0)
