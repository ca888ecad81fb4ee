"""Networks and policies for deployment: torch.export, ONNX, AOTInductor."""

from composite_losses.export.formats import max_difference, to_onnx, to_package, to_program

__all__ = ["max_difference", "to_onnx", "to_package", "to_program"]
