"""A calculator as a tool, in TRL's form: `configs/smollm2_calculator.yaml` trains on it."""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}
MAX_CHARS = 100  # of an expression


class Calculator:
    """Rewards 1 if the last result is the answer, and 0.2 for another result."""

    def __init__(self):
        self.result = None

    def reset(self, answer, **columns) -> None:
        """answer: a column of the data."""
        self.answer, self.result = int(answer), None

    def calculate(self, expression: str) -> int:
        """Compute the value of an arithmetic expression.

        Args:
            expression: Integers with +, -, * and parentheses, such as 3 + 4.
        """
        if len(expression) > MAX_CHARS:
            raise ValueError(f"an expression has at most {MAX_CHARS} characters")
        self.result = value_of(ast.parse(expression.strip(), mode="eval").body)
        return self.result

    def get_reward(self) -> float:
        """Return the reward of the episode, once it is over."""
        if self.result is None:
            return 0.0
        return 1.0 if self.result == self.answer else 0.2


def value_of(node: ast.expr) -> int:
    """Return the value of integers and OPERATORS. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.operand))
    raise ValueError(f"{ast.unparse(node)} is not integers with +, -, * and parentheses")
