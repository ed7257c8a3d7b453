"""Mixture of experts in stages: route, plan, dispatch, compute, combine."""
