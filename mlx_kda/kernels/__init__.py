"""The Python side of each kernel of metal/: shapes in, arrays out."""
