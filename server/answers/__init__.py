"""From requests to generations and back: settings, tools, the text with its tokens, and the three ways of answering."""
