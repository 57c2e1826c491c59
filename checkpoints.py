"""
Checkpoints, in the folder ckpt/ of a run:

    step_00001000.pt      config, step, tokenizer, and the tensors of the run: weights, optimizer moments, averaged weights
    step_00001000/        with parallel=fsdp the tensors are here, in shards that the processes wrote side by side
    latest.pt, best.pt    the newest of these files, and the one with the lowest validation loss, under another name

Who reads one need not know how it was written: `load_checkpoint` puts shards together, and `restore` deals whole tensors
out to the processes of a sharded run, whatever their number. Nothing in a checkpoint is executed, and what stands under
one of these names is always complete.

`tensors` below is {"model": .., "exp_avg": .., "exp_avg_sq": .., "ema": ..}, each {parameter name: tensor}; the tensors of
a sharded model are DTensors. "ema" is there if the run keeps averages.
"""

import os
import pickle
import shutil
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

from errors import ConfigError, RunError
from tokenizer import restore_tokenizer

MOMENTS = "exp_avg", "exp_avg_sq"         # of AdamW


def write_atomically(path, write):
    """Call write(file) on a temporary beside `path`, then put it in place: `path` is the old file or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# writing


def save_checkpoint(folder, facts, tensors, best, keep_last, group=None, first=True):
    """
    Write folder/step_N.pt, where facts["step"] is N, and point latest.pt (and best.pt, if `best`) at it; then delete
    numbered ones beyond keep_last. `group` is None, or all processes of a sharded run, each of which must call this; `first`
    marks the one that writes what is no shard. A passing I/O error is tried again; after the third the run ends, the
    checkpoints of before as they were.
    """
    path = folder / f"step_{facts['step']:08d}.pt"
    for attempt in (1, 2, 3):
        try:
            if group is not None:
                write_shards(path.with_suffix(""), tensors, group, first)
                facts = facts | {"shards": path.stem}
            if first:
                whole = {} if group is not None else tensors
                write_atomically(path, lambda f: torch.save(facts | whole, f))
            break
        except (OSError, RuntimeError, dcp.api.CheckpointException) as e:
            if attempt == 3:
                reason = (str(e).strip().splitlines() or [type(e).__name__])[-1]
                raise RunError(f"cannot write {path}: {reason}; the checkpoints before it are untouched") from None
            time.sleep(attempt)
    if not first:
        return
    for name in ["latest.pt"] + ["best.pt"] * best:
        link = folder / (name + ".tmp")
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)
        except OSError:                                                   # a file system without hard links
            shutil.copyfile(path, link)
        os.replace(link, folder / name)
        link.unlink(missing_ok=True)                                      # rename leaves it if both are one file already
    for old in sorted(folder.glob("step_*.pt"))[:-keep_last]:
        old.unlink()
    if shards := [p for p in folder.glob("step_*") if p.is_dir()]:
        used = {read(p).get("shards") for p in folder.glob("*.pt")}
        for old in shards:
            if old.name not in used:
                shutil.rmtree(old)


def write_shards(folder, tensors, group, first):
    """`tensors` into the new `folder`, by all processes of `group` together."""
    temporary = folder.with_name(folder.name + ".tmp")
    dcp.save(flat(tensors), storage_writer=dcp.FileSystemWriter(temporary), process_group=group)
    if first:
        if folder.exists():
            shutil.rmtree(folder)                                         # left behind by a run that was killed here
        os.rename(temporary, folder)


def flat(tensors):
    return {f"{tree}/{name}": t for tree, named in tensors.items() for name, t in named.items()}


# ----------------------------------------------------------------------------------------------------------------------
# reading


def read(path):
    """What is in a file of a checkpoint; tensors stay on the disk until somebody looks at them."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ConfigError(f"no checkpoint at {path}") from None
    except Exception as e:                                         # damaged files make torch raise almost anything
        reason = (str(e).splitlines() or [type(e).__name__])[0][:120]
        raise ConfigError(f"{path} is not a nanoDepth checkpoint, or is cut short ({reason})") from None
    if not isinstance(state, dict) or not ("config" in state and ("model" in state or "shards" in state)):
        raise ConfigError(f"{path} is not a nanoDepth checkpoint: it has no config and model")
    return state


def file_of(path):
    """The file at `path`, or the latest of the run whose out_dir it is."""
    return Path(path) / "ckpt" / "latest.pt" if Path(path).is_dir() else Path(path)


def load_checkpoint(path, moments=False):
    """
    The dict that train.py saved, whole and on the CPU; `path` is the file, or the out_dir of a run (its latest checkpoint).
    Of shards, those of the optimizer's moments are read only on request.
    """
    path = file_of(path)
    state = read(path)
    if "shards" in state:
        reader = Reader(path.parent / state.pop("shards"))
        found = reader.read_metadata().state_dict_metadata
        whole = {key: torch.empty(t.size, dtype=t.properties.dtype) for key, t in found.items()
                 if moments or key.partition("/")[0] not in MOMENTS}
        load_shards(reader, whole)
        for key, t in whole.items():
            tree, _, name = key.partition("/")
            state.setdefault(tree, {})[name] = t
    return state


def restore(path, state, tensors):
    """
    Copy the values of a checkpoint into the live `tensors`. `state` is what `read` gave for the file `path`. What the
    checkpoint has no averages for starts from its weights.
    """
    sharded = any(isinstance(t, DTensor) for t in tensors["model"].values())
    if "shards" in state and sharded:                                     # each process reads its own part
        reader = Reader(path.parent / state["shards"])
        trees = {key.partition("/")[0] for key in reader.read_metadata().state_dict_metadata}
        load_shards(reader, flat({tree: named for tree, named in tensors.items() if tree in trees}))
    else:
        state = load_checkpoint(path, moments=True) if "shards" in state else state
        trees = state.keys()
        for tree in tensors.keys() & trees:
            for verb, odd in (("lacks", tensors[tree].keys() - state[tree].keys()), ("has", state[tree].keys() - tensors[tree].keys())):
                if odd:
                    raise ConfigError(f"{path} {verb} {min(odd)} of {tree}" + f" (and {len(odd) - 1} more)" * (len(odd) > 1)
                                      + ", which this model has not" * (verb == "has"))
            for name, t in tensors[tree].items():
                if (shape := state[tree][name].shape) != t.shape:
                    raise ConfigError(f"{path} has {name} of {tree} as {tuple(shape)}, not {tuple(t.shape)}")
                fill(t, state[tree][name])
    if "ema" in tensors and "ema" not in trees:
        for name, t in tensors["ema"].items():
            t.copy_(tensors["model"][name])


def pack_tokenizer(tokenizer):
    """What a checkpoint holds of a Tokenizer under "tokenizer"."""
    file = None if tokenizer.file is None else torch.frombuffer(bytearray(tokenizer.file), dtype=torch.uint8)
    return tokenizer.meta() | {"file": file}


def tokenizer_of(state):
    """The Tokenizer of a checkpoint's dict."""
    packed = state["tokenizer"]
    return restore_tokenizer(packed, None if packed["file"] is None else bytes(packed["file"].numpy()))


def fill(tensor, whole):
    """Copy `whole` into `tensor`, or into this process's part of it."""
    if isinstance(tensor, DTensor):
        whole = distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(whole)


def load_shards(reader, tensors):
    """Fill `tensors`, {"tree/name": tensor}, from a folder of shards."""
    try:
        with warnings.catch_warnings():                                    # one process reading alone is what is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader)
    except (dcp.api.CheckpointException, OSError, KeyError, RuntimeError, ValueError) as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[-1][:150]
        raise ConfigError(f"the shards in {reader.path} are incomplete or of another model ({reason})") from None


class Reader(dcp.FileSystemReader):
    """Reads shards, but not their index as any pickle: only what torch.distributed.checkpoint writes into one."""

    def read_metadata(self, *args, **kwargs):
        try:
            with open(Path(self.path) / ".metadata", "rb") as f:
                return Index(f).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as e:
            raise ConfigError(f"the shards in {self.path} cannot be read: {e}") from None


class Index(pickle.Unpickler):
    KNOWN = {"torch.distributed.checkpoint.metadata": {"Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
                                                       "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"},
             "torch.distributed.checkpoint.filesystem": {"_StorageInfo"}, "torch.serialization": {"_get_layout"},
             "torch": {"Size", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"},
             "pathlib": {"PosixPath", "WindowsPath"}, "pathlib._local": {"PosixPath", "WindowsPath"}}

    def find_class(self, module, name):
        if name not in self.KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
