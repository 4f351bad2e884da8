"""Drop what no output needs."""

from __future__ import annotations

from autoshard.program import Program


def drop_dead_code(program: Program) -> Program:
    """Erase ops without users, and the parameters, buffers and constants that no op reads. Inputs stay: a caller gives them anyway.

    before:  y = relu(x); z = add(x, bias); return [y]
    after:   y = relu(x); return [y]                     # bias is no param of the program any more
    """
    for node in reversed(list(program.graph.nodes)):
        if node.users or node.op == "output":
            continue
        if node.op == "call_function":
            program.graph.erase_node(node)
        elif node.name in program.params:
            del program.params[node.name]
            program.graph.erase_node(node)
    return program
