"""Train the demo model: a 1.6 M-parameter byte-level Qwen3-MoE that writes text resembling Python source.

The data are the Python standard library's own source files, so nothing is downloaded. Training starts on short windows
and moves to longer ones, up to 16384 bytes, so that the model still reads well behind a long prompt. It trains for the
minutes it is given on one CPU core (25 for the weights in recipes/demo), scores the result for about one more, and
leaves a bf16 checkpoint with its tokenizer:

    python -m cpkit.launch.train_demo OUT_DIR --minutes 25
"""

import argparse
import copy
import math
import os
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

EOS = 256  # ids 0-255 are the bytes themselves
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings"}
HELD_OUT_FILES = 16
# (window length in bytes, windows per step, share of the training time)
PHASES = ((256, 8, 0.45), (1024, 2, 0.25), (4096, 1, 0.12), (8192, 1, 0.11), (16384, 1, 0.07))
PEAK_LR = 3e-3
FINAL_LR = 1e-4
WARMUP_STEPS = 100
SHARPENING = 1.6  # multiplies the queries after training: attention fades over the long windows, of which few are seen


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, whose ids are the byte values, and one special token."""
    vocab = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    name = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=name, pad_token=name, model_max_length=32768)


def make_config() -> Qwen3MoeConfig:
    """A small Qwen3-MoE: grouped-query attention, one dense layer, then layers of eight experts, two used per token."""
    return Qwen3MoeConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=EOS,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )


def read_data() -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's files in a shuffled order, each closed by EOS: the training ids and the held-out ids."""
    root = Path(os.__file__).parent
    files = [f for f in sorted(root.rglob("*.py")) if not SKIPPED_FOLDERS.intersection(f.relative_to(root).parts)]
    random.shuffle(files)
    texts = [torch.tensor([*f.read_bytes(), EOS], dtype=torch.int16) for f in files]
    return torch.cat(texts[:-HELD_OUT_FILES]), torch.cat(texts[-HELD_OUT_FILES:])


def sample(data: torch.Tensor, windows: int, length: int) -> torch.Tensor:
    starts = torch.randint(len(data) - length, (windows,)).tolist()
    return torch.stack([data[s : s + length] for s in starts]).long()


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: torch.Tensor, length: int, windows: int) -> float:
    """Nats per byte over the last 256 bytes (at most) of evenly spaced windows."""
    model.eval()
    losses = []
    for i in range(windows):
        start = i * (len(data) - length) // windows
        ids = data[start : start + length].long()
        logits = model(input_ids=ids[None], use_cache=False, output_router_logits=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")[-256:].mean().item())
    model.train()
    return sum(losses) / len(losses)


def save(model: torch.nn.Module, folder: Path) -> None:
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.config.output_router_logits = False
    model.generation_config.do_sample = False
    model.save_pretrained(folder)


def train(folder: Path, minutes: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    training, held_out = read_data()
    model = AutoModelForCausalLM.from_config(make_config(), attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    make_tokenizer().save_pretrained(folder)
    print(f"{model.num_parameters()} parameters, {len(training)} + {len(held_out)} bytes", flush=True)

    begin, step, seen, phase_end = time.monotonic(), 0, 0, 0.0
    for length, windows, share in PHASES:
        phase_end += share
        done, losses = (time.monotonic() - begin) / (60 * minutes), []
        while done < phase_end:
            lr = FINAL_LR + (PEAK_LR - FINAL_LR) * (1 + math.cos(math.pi * min(1.0, done))) / 2
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARMUP_STEPS)
            ids = sample(training, windows, length)
            output = model(input_ids=ids, labels=ids, use_cache=False)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((output.loss - model.config.router_aux_loss_coef * output.aux_loss).item())
            step, seen = step + 1, seen + ids.numel()
            done = (time.monotonic() - begin) / (60 * minutes)
            if step % 200 == 0 or done >= phase_end:
                recent = sum(losses[-200:]) / len(losses[-200:])
                print(f"{done:4.0%} step {step} length {length} bytes {seen} loss {recent:.3f}", flush=True)
                save(model, folder)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.mul_(SHARPENING)
    save(model, folder)
    for length, windows in ((512, 64), (8192, 4), (16384, 3)):
        scores = [evaluate(model, data, length, windows) for data in (training, held_out)]
        print(f"length {length}: training {scores[0]:.3f}, held-out {scores[1]:.3f} nats per byte", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the checkpoint and its tokenizer")
    parser.add_argument("--minutes", type=float, default=25.0, help="training time")
    args = parser.parse_args()
    train(args.folder, args.minutes)
