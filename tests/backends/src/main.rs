//! The worker of the tests: the ordinary worker with the backend `test`.

use std::process::ExitCode;

use pharos_worker::Worker;

fn main() -> ExitCode {
    Worker::new().backend("test", pharos_test_backends::create).run()
}
