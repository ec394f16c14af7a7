"""Export of patched checkpoints to transformers' own models: `native` drives it, `targets` lists what is possible."""

from hf_qknorm.export.native import NativeExport, export_native

__all__ = ["NativeExport", "export_native"]
