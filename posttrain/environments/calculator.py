"""A calculator as an environment of one tool."""

import ast
import operator
from typing import Any

from posttrain.environments import Environment

LONGEST = 200  # characters of an expression
LARGEST = 10**50  # of a whole number, so that powers stay small
OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


class Calculator(Environment):
    """Computes expressions of numbers. It has no reward: grade the reply, for example with the rule `gsm8k`."""

    def reset(self, **row: Any) -> None:
        self.expressions: list[str] = []

    def calculate(self, expression: str) -> str:
        """
        Compute an arithmetic expression with + - * / // % ** and parentheses.

        Args:
            expression: the expression, such as (3 + 4) * 12
        """
        self.expressions.append(expression)
        return value_of(expression)


def value_of(expression: str) -> str:
    """The value of an expression; whole numbers are exact. Raises ValueError for anything else than arithmetic."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {LONGEST} are computed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > 200 or abs(left) > 1e6):
            raise ValueError("the power is too large")
        value = OPERATIONS[type(node.op)](left, right)
        if isinstance(value, complex) or abs(value) > LARGEST:
            raise ValueError("the value is not a number below 10^50")
        return value
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")
