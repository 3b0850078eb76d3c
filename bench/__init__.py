"""Measuring tools. Those for operators (multiturn, advise) are commands of `turnback`; the others need a checkout."""
