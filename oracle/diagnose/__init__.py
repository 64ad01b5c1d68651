"""Why a target is wrong."""
