"""Proposers of draft tokens (`core.interfaces.Proposer`): where drafts come from, and how many are worth a step's time.

    texts (request, prediction, recent outputs) ─► Guess ─► acceptance ─► budget ─► drafts of the step

Standard library only; deterministic; each step costs a bounded time.
"""
