"""A handler behind an envelope: returns its input."""


class Items:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [item["data"] if isinstance(item, dict) else item.decode() if isinstance(item, bytes) else item for item in data]
