"""One thread a rank, nothing fetched, and quiet: set before torch and transformers are imported."""

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}

import torch  # noqa: E402

torch.set_num_threads(1)
