"Every kind of quantised product, made of a weight: for tests of their kernels on a CPU or a GPU."
from llminfer.quantization import Fp8, Int4, Int8, Table4


def q4_1(w, bias=None):
    p = Int4.quantise(w, bias, group=32)
    p.low = (-8 * p.scale.float()).half()
    return p


def q8_0(w, bias=None):
    p = Int8.quantise(w, bias)
    p.scale = p.scale[:, None].expand(-1, w.shape[1] // 32).half().contiguous()
    return p


KINDS = {"nf4": Table4.quantise, "nf4-single": lambda w, b=None: Table4.quantise(w, b, double_quant=False), "fp4": lambda w, b=None: Table4.quantise(w, b, kind="fp4"),
         "int4": Int4.quantise, "int4-32": lambda w, b=None: Int4.quantise(w, b, group=32), "int4-zeros": lambda w, b=None: Int4.quantise(w, b, symmetric=False), "q4_1": q4_1,
         "int8": Int8.quantise, "q8_0": q8_0, "fp8": Fp8.quantise}
