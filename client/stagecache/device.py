"""The one seam for the device: clones and copies of rows. On the CPU all of them are done when they return."""

from __future__ import annotations

import torch


class CpuDevice:
    """Copies for tensors in host memory."""

    name = "cpu"

    def clone(self, rows: torch.Tensor) -> torch.Tensor:
        """An independent copy on the same device, contiguous."""
        return rows.detach().clone(memory_format=torch.contiguous_format)

    def stage(self, page: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows into a staging page. page: [n, *row shape], host; rows: the same shape and dtype."""
        page.copy_(rows)

    def to_host(self, rows: torch.Tensor) -> torch.Tensor:
        """An independent contiguous copy in host memory."""
        host = rows.detach().to("cpu")
        return host.clone(memory_format=torch.contiguous_format) if host.data_ptr() == rows.data_ptr() else host
