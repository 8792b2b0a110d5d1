from dataclasses import dataclass

from calibeam.recipe import StageConfig, option


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    before: str = option(help="", identity=False)
    after: str = option(help="", identity=False)
    calibrated: str = option(help="", identity=False)
