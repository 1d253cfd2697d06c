"""What a device is: memory, arithmetic, and how fast bytes move, from the vendors' data sheets.

    device = DEVICES["h100"]
    device.bus(peers=16, stride=2)              # bytes per second of a collective over every second of 32 neighbours

bf16 rates are dense ones (the sheets' large figures count zeros of 2:4 sparsity). Bandwidths are one-way per device: NVLink's sheets
add both directions. Between nodes every device has a network port of its own, as in DGX systems. `cpu` is the machine at hand.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

GIB = 2**30
GB = 10**9


@dataclass(frozen=True, slots=True)
class Device:
    """memory: bytes. bf16_flops, float32_flops: per second. hbm, link (inside a node), network (between nodes): bytes per second, one way.
    node: devices of a node. runtime: bytes that a process takes before it holds a tensor (beyond the imports, on a CPU). holes: what the
    allocator cannot use, as a part of what comes and goes (memory.py). fused_norms: torch's own RMSNorm is one kernel here. one_heap: blocks of all
    sizes lie in one heap, so that what FSDP gathers and gives up leaves holes too."""

    name: str
    memory: int
    bf16_flops: float
    float32_flops: float
    hbm: float
    link: float
    network: float
    node: int
    runtime: int
    holes: float
    fused_norms: bool = True
    one_heap: bool = False

    def flops(self, dtype: str) -> float:
        return self.bf16_flops if dtype == "bfloat16" else self.float32_flops

    def bus(self, peers: int, stride: int = 1) -> float:
        """Bytes per second and device of a ring over `peers` ranks, `stride` apart. Rings that leave the node use the ports of all their
        members in it side by side (NCCL does), and are never faster than the links inside."""
        if peers * stride <= self.node:
            return self.link
        inside = max(1, self.node // stride)
        return min(self.link, inside * self.network)


def _gpu(
    name: str, memory_mib: int, tflops: float, tf32: float, hbm_tb: float, nvlink_gb: float, network_gb: float
) -> Device:
    return Device(
        name=name,
        memory=memory_mib * 2**20,
        bf16_flops=tflops * 1e12,
        float32_flops=tf32 * 1e12,
        hbm=hbm_tb * 1e12,
        link=nvlink_gb * GB,
        network=network_gb * GB,
        node=8,
        # CUDA context, cuBLAS work space, and NCCL's buffers for a handful of groups.
        runtime=5 * GIB // 2,
        # The caching allocator rounds to 2 MiB and splits blocks; what torch itself reports as reserved but not allocated.
        holes=0.1,
    )


DEVICES: dict[str, Device] = {
    # memory as nvidia-smi reports it. float32 is plain FP32 on the CUDA cores: torch leaves TF32 off for matrix products.
    # NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 67 FP32, 3.35 TB/s, NVLink 900 GB/s both ways; DGX H100: 8 ports of 400 Gb/s.
    "h100": _gpu("h100", 81559, 989, 67, 3.35, 450, 50),
    # NVIDIA H200 SXM data sheet: the same arithmetic and links, 141 GB at 4.8 TB/s.
    "h200": _gpu("h200", 143771, 989, 67, 4.8, 450, 50),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16, 19.5 FP32, 2.04 TB/s, NVLink 600 GB/s both ways; DGX A100: 8 ports of 200 Gb/s.
    "a100": _gpu("a100", 81920, 312, 19.5, 2.04, 300, 25),
    # One core with AVX-512: the bundled 135M trains on it at half of this rate. Ranks talk through loopback.
    "cpu": Device(
        name="cpu",
        memory=0,
        bf16_flops=1.5e11,
        float32_flops=1.5e11,
        hbm=1e10,
        link=2e9,
        network=2e9,
        node=1 << 30,
        # Code of torch that the first step pages in.
        runtime=25 * 2**20,
        # Holes of glibc's heap, where all blocks below 32 MiB lie: Knuth's fifty-percent rule (TAOCP 1, 2.5) expects half as many holes as
        # blocks in use, and these are somewhat smaller; measured 0.35 to 0.38 of the bytes at 256, 512 and 1024 tokens of the 135M.
        holes=0.35,
        fused_norms=False,
        one_heap=True,
    ),
}


def device_named(name: str, ranks: int) -> Device:
    """A row of DEVICES; of `cpu` each of the ranks has its part of this machine's memory."""
    device = DEVICES[name]
    if device.memory:
        return device
    return replace(device, memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks)
