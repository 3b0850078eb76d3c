"""Measuring tools. They need the local pair (deploy.local) and the development dependencies."""
