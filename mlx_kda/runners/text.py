"""The Metal text that MLX generates for a call of a custom kernel.

MLX puts its utilities in front of it; what follows them is written here, byte for byte as
`verbose=True` prints it, so that the emulator compiles what Apple's compiler would get.
"""

from dataclasses import dataclass

import mlx.core as mx

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# Fewer elements than this and MLX puts an input into the constant address space.
CONSTANT_BELOW = 8


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated function.

    ``source`` says where its value comes from: "input", "output", "shape", "strides", "ndim" (of
    input ``index``) or "attribute".
    """

    declaration: str
    source: str
    index: int = 0
    name: str = ""


@dataclass(frozen=True)
class KernelText:
    """The generated text and what is needed to call the function in it."""

    text: str
    function: str  # with its template arguments
    parameters: tuple[Parameter, ...]
    header_lines: int
    source_first: int  # line of the text on which the source begins
    source_lines: int

    def locate(self, line: int) -> dict:
        """Where a line of the text is: ``line`` of the source or ``header_line``, and ``text``."""
        lines = self.text.split("\n")
        if not 0 < line <= len(lines):
            return {}
        where = {"text": lines[line - 1]}
        in_source = line - self.source_first + 1
        if 1 <= in_source <= self.source_lines:
            where["line"] = in_source
        elif line <= self.header_lines:
            where["header_line"] = line
        return where


def template_value(value) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, mx.Dtype):
        return TYPE_NAMES[value]
    raise ValueError(
        "[metal_kernel] Invalid template argument. Must be `mlx.core.Dtype`, `int` or `bool`."
    )


def _template_kind(value) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _input_parameters(name, array, index, source, needs):
    type_name = TYPE_NAMES[array.dtype]
    if array.ndim == 0:
        yield Parameter(f"const constant {type_name}& {name}", "input", index, name)
    elif array.size < CONSTANT_BELOW:
        yield Parameter(f"const constant {type_name}* {name}", "input", index, name)
    else:
        yield Parameter(f"const device {type_name}* {name}", "input", index, name)
    if array.ndim > 0:
        wanted = {
            "shape": f"const constant int* {name}_shape",
            "strides": f"const constant int64_t* {name}_strides",
            "ndim": f"const constant int& {name}_ndim",
        }
        for what, declaration in wanted.items():
            if what in needs:
                yield Parameter(declaration, what, index, name)


def _mark(array) -> str:
    """How an input's kind appears in the function's name."""
    if array.ndim == 0:
        return "s"
    return "c" if array.size < CONSTANT_BELOW else ""


def generate(
    name,
    input_names,
    output_names,
    source,
    header,
    inputs,
    output_dtypes,
    template=(),
    atomic_outputs=False,
) -> KernelText:
    """The text for a call with these inputs (arrays) and output dtypes, as MLX would print it."""
    template = list(template or ())
    parts = [f"custom_kernel_{name}"]
    if template:
        values = (template_value(value) for _, value in template)
        parts.append("".join("_" + value.replace("-", "_") for value in values))
    parts += [TYPE_NAMES[array.dtype] + _mark(array) for array in inputs]
    parts += [TYPE_NAMES[dtype] for dtype in output_dtypes]
    function = "_".join(parts)

    parameters = []
    for index, (input_name, array) in enumerate(zip(input_names, inputs, strict=True)):
        needs = {w for w in ("shape", "strides", "ndim") if f"{input_name}_{w}" in source}
        parameters += _input_parameters(input_name, array, index, source, needs)
    for index, (output_name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        type_name = TYPE_NAMES[dtype]
        if atomic_outputs:
            type_name = f"atomic<{type_name}>"
        parameters.append(Parameter(f"device {type_name}* {output_name}", "output", index))
    attributes = [a for a in ATTRIBUTES if a in source]

    out = [header]
    if template:
        kinds = ", ".join(f"{_template_kind(value)} {key}" for key, value in template)
        out.append(f"template <{kinds}>\n")
    out.append(f"[[kernel]] void {function}(\n")
    outputs_from = len(parameters) - len(output_names)
    for index, parameter in enumerate(parameters):
        out.append(f"  {parameter.declaration} [[buffer({index})]]")
        # Without attributes MLX counts names, not parameters, to find the last output; a shape,
        # strides or rank among the inputs then makes it close the list early.
        last = len(input_names) + len(output_names) - 1
        closes = index >= max(outputs_from, last) and not attributes
        out.append(") {\n" if closes else ",\n")
    for index, attribute in enumerate(attributes):
        out.append(f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]")
        out.append(") {\n" if index == len(attributes) - 1 else ",\n")
        parameters.append(Parameter(attribute, "attribute", name=attribute))
    before = "".join(out)
    out += [source, "\n}\n"]
    called = function
    if template:
        called += "<" + ", ".join(template_value(value) for _, value in template) + ">"
        out.append(
            f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({called}) {called};\n'
        )
    return KernelText(
        text="".join(out),
        function=called,
        parameters=tuple(parameters),
        header_lines=header.count("\n"),
        source_first=before.count("\n") + 1,
        source_lines=source.count("\n") + 1,
    )
