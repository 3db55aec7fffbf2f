"""Remove units and restore them, in modules, states, optimizers and files."""

from sparsekit.surgery.compaction import compact, expand
from sparsekit.surgery.onnx import export_onnx, export_program
from sparsekit.surgery.saving import Factory, load_compact, load_mask, save_compact

__all__ = ["Factory", "compact", "expand", "export_onnx", "export_program", "load_compact", "load_mask", "save_compact"]
