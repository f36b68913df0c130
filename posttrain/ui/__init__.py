"""The pages of `posttrain ui`: plain routes, and Gradio for the chat. Imports no torch."""
