from tests.rules.builder import Stage, spelled
def test_hit(stage: Stage) -> None:
    stage.step("a:[0,1]@0+8")
    out = stage.step("b:[0,1,2]@8+2", "a:[0,1,3]@8+1")
    assert out["b"] == spelled("a", 0, 8) + " b8 b9"
