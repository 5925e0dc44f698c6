from smalti.attention.blockwise.vjp import blockwise as blockwise
