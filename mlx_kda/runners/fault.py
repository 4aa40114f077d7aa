"""What the emulator found wrong with a kernel."""

KINDS = (
    "out-of-bounds",
    "race",
    "divergence",
    "uninitialised",
    "unwritten-output",
    "limits",
    "unsupported",
)


class KernelFault(Exception):
    """A fault in a Metal kernel, found by running or compiling it in the emulator.

    Attributes:
        kind: one of ``mlx_kda.runners.fault.KINDS``.
        kernel: the kernel's name.
        thread: ``thread_position_in_grid`` of the thread at fault, or None.
        line: line of the kernel's ``source`` (from 1), or None if the fault lies elsewhere.
        header_line: line of the kernel's ``header``, if the fault lies there.
        text: that line.
    """

    def __init__(
        self,
        kind: str,
        kernel: str,
        message: str,
        *,
        thread: tuple[int, ...] | None = None,
        line: int | None = None,
        header_line: int | None = None,
        text: str = "",
    ):
        self.kind = kind
        self.kernel = kernel
        self.message = message
        self.thread = thread
        self.line = line
        self.header_line = header_line
        self.text = text.strip()
        where = ""
        if line is not None:
            where = f", line {line}"
        elif header_line is not None:
            where = f", header line {header_line}"
        who = f", thread {thread}" if thread is not None else ""
        quote = f": {self.text}" if self.text else ""
        super().__init__(f"{kind} in kernel {kernel}{where}{who}: {message}{quote}")
