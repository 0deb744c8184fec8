"""Tests of shardweave; the folders mirror the package."""
