"""The products of decode as a kernel that reads weights as quickly as its SMs can."""
