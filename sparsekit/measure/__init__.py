"""Costs of a model, and budgets for them."""

from sparsekit.measure.budget import Budget, BudgetError, format_cost
from sparsekit.measure.cost import Cost, CostModel, CostTerm, cost_model, count_cost

__all__ = ["Budget", "BudgetError", "Cost", "CostModel", "CostTerm", "cost_model", "count_cost", "format_cost"]
