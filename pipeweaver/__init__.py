"""pipeweaver: a schedule of its own for every batch of a multimodal model; see README.md and docs/architecture.md."""

from pipeweaver.kernel_cache import use_kernel_cache

use_kernel_cache()
