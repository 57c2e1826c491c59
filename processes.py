"""Where a command runs: the device, and the processes that torchrun started."""

import os

import torch
import torch.distributed as dist

from errors import ConfigError


def choose_device(name):
    """'auto' -> cuda, mps or cpu; any other name is checked to be there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.partition(":")[0]                                          # of cuda:1, say
    if kind not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"unknown device={name!r}; known: auto, cpu, cuda, mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch sees no GPU: use --device=cpu, or install a CUDA build of torch")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name}, but torch has no MPS here: use --device=cpu")
    return name


class Processes:
    """The processes of the run as torchrun made them (one without it)."""

    def __init__(self, device):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        self.control = None
        if "RANK" in os.environ:
            try:
                dist.init_process_group("nccl" if device == "cuda" else "gloo")
                dist.all_reduce(torch.ones((), device=self.device))       # here, and not hours later, it shows if they cannot
            except (RuntimeError, ValueError) as e:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                raise ConfigError(f"the processes cannot meet at {where} ({str(e).splitlines()[0][:150]}): "
                                  "choose another port with torchrun --master_port=N, or use --standalone") from None
            self.control = dist.new_group(backend="gloo")                 # agreements that must not wait for the GPU

    def any(self, flag):
        """True on all processes if it is on one."""
        if self.control is None:
            return flag
        t = torch.tensor(int(flag))
        dist.all_reduce(t, op=dist.ReduceOp.MAX, group=self.control)
        return bool(t)

    def sum(self, tensor):
        """Over all processes, in place."""
        if self.control is not None:
            dist.all_reduce(tensor, group=self.control if tensor.device.type == "cpu" else None)
        return tensor

    def barrier(self):
        if self.control is not None:
            dist.barrier(group=self.control)

    def close(self):
        if self.control is not None:
            dist.destroy_process_group()
