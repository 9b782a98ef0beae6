//! Detects whether the code of a Python model may complete its configuration. Starting an
//! interpreter only to find out that it does not takes half of the model's load time.

const CLASS: &str = "TritonPythonModel";

/// Returns whether the code may define `auto_complete_config`. Returns false only if that is
/// certain: the name appears nowhere in the code, and the model's class is defined exactly once,
/// without base classes, decorators or keywords, and is never assigned or imported.
///
/// The result does not depend on the configuration: the method may add a scheduler to a complete
/// configuration or refuse it, and Triton always calls it.
pub fn may_auto_complete(code: &str) -> bool {
    if code.contains("auto_complete_config") || code.contains("globals()") {
        return true;
    }
    let mut is_defined = false;
    let mut is_decorated = false;
    for line in
        code.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
    {
        if line.starts_with([' ', '\t']) {
            if binds_class(line.trim_start()) {
                return true;
            }
        } else if is_plain_class(line) {
            if is_defined || is_decorated {
                return true;
            }
            is_defined = true;
        } else if line.contains(CLASS) || (is_defined && line.contains("import *")) {
            return true;
        }
        is_decorated = line.starts_with('@');
    }
    !is_defined
}

/// Returns whether the line is `class TritonPythonModel:`, optionally with `()` or `(object)`.
fn is_plain_class(line: &str) -> bool {
    let code = line.split('#').next().unwrap_or_default();
    let compact: String = code.split_whitespace().collect::<Vec<_>>().join(" ");
    let rest = compact.strip_prefix("class ").and_then(|rest| rest.strip_prefix(CLASS));
    matches!(rest.map(str::trim_start), Some(":" | "():" | "(object):"))
}

/// Returns whether an indented line may define or replace the class.
fn binds_class(line: &str) -> bool {
    let begins = ["class ", "from ", "import ", "global ", "setattr", CLASS]
        .iter()
        .any(|word| line.starts_with(word));
    begins && line.contains(CLASS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_false_for_plain_classes_without_the_method() {
        for code in [
            "class TritonPythonModel:\n    def execute(self, requests): pass\n",
            "import numpy as np\nfrom x import *\n\nclass TritonPythonModel(object):  # the \
             model\r\n    pass\r\n",
            "# TritonPythonModel\nclass  TritonPythonModel ():\n    \"\"\"Must have \
             TritonPythonModel as its name.\"\"\"\n",
            "@dec\ndef f(): pass\n\nclass TritonPythonModel:\n    def f(self): return \
             super(TritonPythonModel, self)\n",
        ] {
            assert!(!may_auto_complete(code), "{code}");
        }
    }

    #[test]
    fn returns_true_for_any_other_code() {
        for code in [
            "",
            "x = 1\n",
            "from impl import TritonPythonModel\n",
            "from impl import *\n",
            "class TritonPythonModel(Base):\n    pass\n",
            "class TritonPythonModel(metaclass=Meta):\n    pass\n",
            "@complete\nclass TritonPythonModel:\n    pass\n",
            "class TritonPythonModel:\n    pass\nfrom impl import *\n",
            "class TritonPythonModel:\n    pass\nTritonPythonModel = wrap(TritonPythonModel)\n",
            "class TritonPythonModel:\n    pass\nclass TritonPythonModel:\n    pass\n",
            "class TritonPythonModel:\n    pass\nif fast:\n    from impl import \
             TritonPythonModel\n",
            "class TritonPythonModel:\n    pass\nif fast:\n    class TritonPythonModel(Base): \
             pass\n",
            "try:\n    class TritonPythonModel:\n        pass\nfinally: pass\n",
            "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config): \
             return config\n",
            "class TritonPythonModel:\n    pass\nglobals()['Triton' + 'PythonModel'] = Base\n",
        ] {
            assert!(may_auto_complete(code), "{code}");
        }
    }
}
