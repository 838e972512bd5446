"""Python scripts under torchrun and under accelerate launch: the process group is found or made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys, torch, cpkit
sys.path.insert(0, {root!r})
from tests.tiny import make, tokens
if {given}:
    torch.distributed.init_process_group("gloo")
model = cpkit.apply(make(), cpkit.Topology(cp=2, ep=2), strategy="zigzag")
with torch.no_grad():
    expected = make()(tokens(1, 33)).logits
difference = float((model(tokens(1, 33)).logits - expected).abs().max())
assert difference < 2e-5, difference
print(f"rank {{torch.distributed.get_rank()}} exact", flush=True)
if {given}:
    torch.distributed.destroy_process_group()
"""
ENTRY = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # --multi_gpu is accelerate's launcher of several processes on a machine; the script itself runs on the CPU
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    + ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"],
}


@pytest.mark.parametrize("entry, given", [("torchrun", True), ("accelerate", False)])
def test_a_script(entry, given, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), given=given))
    ran = subprocess.run(
        [sys.executable, "-m", *ENTRY[entry], str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "rank 0 exact" in ran.stdout and "rank 1 exact" in ran.stdout, ran.stdout + ran.stderr[-3000:]
