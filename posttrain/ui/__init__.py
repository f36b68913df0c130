"""The pages of `posttrain ui`: plain HTTP routes, and Gradio for the chat. Does not import torch."""
