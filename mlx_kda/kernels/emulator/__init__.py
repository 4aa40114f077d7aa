"""The emulator: runs the text MLX would hand to Apple's compiler on the CPU, and checks it."""
