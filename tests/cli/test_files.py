"""Files that cannot be read or written, or that are not what they seem."""
import os
import pty
import signal
import stat
import struct
import subprocess
import threading
import time
import unittest

import numpy as np
from command import BINARY, CommandTest, call, small_problem, st

ROOM = 1 << 16  # bytes of a file system that is too small


class Input(CommandTest):
    def setUp(self):
        super().setUp()
        self.write(small_problem())

    def test_missing_directory_and_pipe(self):
        os.mkfifo(self.folder / "pipe")
        for name, words in (("nowhere", ["nowhere", "No such file"]), (".", "regular file"),
                            ("pipe", ["pipe", "regular file"]),
                            ("in.safetensors/x", ["in.safetensors/x", "Not a directory"])):
            with self.subTest(name):
                self.assert_fails(2, words, "metadata", self.folder / name, self.out)

    def test_name_with_line_breaks_gives_one_line(self):
        self.assert_fails(2, "no such", "metadata", self.folder / "no such\nfile", self.out)
        hostile = st.File().put("cu_seqlens\nflashdsa: all good", "I32", np.zeros(1))
        hostile.dtypes["cu_seqlens\nflashdsa: all good"] = "I33"
        self.write(hostile)
        self.assert_fails(2, "I33", "metadata", self.source, self.out)

    def test_output_must_not_be_the_input(self):
        os.symlink(self.source, self.folder / "link")
        os.link(self.source, self.folder / "hard")
        for name in ("in.safetensors", "./in.safetensors", "link", "hard"):
            with self.subTest(name):
                self.assert_fails(2, "OUT", "metadata", self.source, self.folder / name)

    def test_types_without_a_use_are_ignored_where_nobody_asks(self):
        def header(extra_name):
            text = ('{"__metadata__":{"total_key_tokens":"3"},'
                    '"cu_seqlens":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},'
                    f'"{extra_name}":{{"dtype":"F8_E4M3","shape":[3],"data_offsets":[8,11]}}}}')
            return struct.pack("<Q", len(text)) + text.encode() + struct.pack("<ii", 0, 3) + b"abc"
        self.source.write_bytes(header("other"))
        self.assert_succeeds("metadata", self.source, self.out)
        self.source.write_bytes(header("padding_mask"))
        self.assert_fails(2, ["padding_mask", "F8_E4M3"], "metadata", self.source, self.out)

    def test_boolean_bytes_are_0_or_1(self):
        file = small_problem().put("padding_mask", "BOOL", np.zeros(12))
        self.write(file)
        raw = bytearray(self.source.read_bytes())
        raw[-1] = 2
        self.source.write_bytes(raw)
        self.assert_fails(2, ["padding_mask", "2", "11"], "metadata", self.source, self.out)

    def test_huge_empty_shapes_ask_for_no_memory(self):
        for shape in ([2**62, 0, 128], [2**30, 0, 576], [0, 2**62, 2**62]):
            with self.subTest(shape):
                text = "{" + ",".join(
                    f'"{name}":{{"dtype":"BF16","shape":{shape},"data_offsets":[0,0]}}'
                    for name in ("q", "kv", "index_q", "index_k", "head_weights")) + (
                    ',"topk_indices":{"dtype":"I32","shape":[0,1,4],"data_offsets":[0,0]},'
                    '"cu_seqlens":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}')
                self.source.write_bytes(struct.pack("<Q", len(text)) + text.encode()
                                        + struct.pack("<ii", 0, 4))
                for command in ("attend", "topk", "run"):
                    self.assert_fails(2, "", command, self.source, self.out, "--softmax-scale=1",
                                      "--index-topk=4")


class OutputFile(CommandTest):
    def setUp(self):
        super().setUp()
        self.write(small_problem())

    def test_places_that_cannot_hold_a_file(self):
        (self.folder / "directory").mkdir()
        os.symlink("loop", self.folder / "loop")
        for name in ("directory", "missing/out", "in.safetensors/out", "new/", "loop", ""):
            with self.subTest(name):
                place = self.folder / name if name and not name.endswith("/") else name
                self.assert_fails(2, name, "metadata", self.source, place, cwd=self.folder)

    def test_it_is_refused_before_anything_is_computed(self):
        """The input has a fault too, which only computing would find."""
        file = small_problem()
        file.put("cu_seqlens", "I32", np.array([0, 5, 4]))
        self.write(file)
        self.assert_fails(2, "missing/out", "metadata", self.source, self.folder / "missing/out")

    def test_full_device(self):
        self.assert_fails(2, ["/dev/full", "No space left"], "run", self.source, "/dev/full")
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))

    def test_null_device_stays_a_device(self):
        self.assert_succeeds("metadata", self.source, "/dev/null")
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))

    def test_full_file_system_keeps_the_old_file(self):
        mount = self.folder / "small"
        mount.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", mount],
                              capture_output=True, check=False)
        if done.returncode != 0:
            self.skipTest(f"cannot mount a file system: {done.stderr.decode().strip()}")
        self.addCleanup(subprocess.run, ["umount", mount], check=True)
        (mount / "out").write_bytes(b"old")
        file = small_problem(rows=40, heads=8)
        self.write(file)
        done = call("run", self.source, mount / "out")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("No space left", done.stderr)
        self.assertEqual((mount / "out").read_bytes(), b"old")
        self.assertEqual(os.listdir(mount), ["out"])

    def test_size_limit_keeps_the_old_file(self):
        self.out.write_bytes(b"old")
        before = self.listing()
        done = subprocess.run(["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", BINARY, "run",
                               self.source, self.out], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("File too large", done.stderr)
        self.assertEqual(self.listing(), before)

    def test_old_file_is_replaced_and_kept_on_failure(self):
        self.out.write_bytes(b"old")
        self.assert_fails(2, "index_topk", "topk", self.source, self.out, "--index-topk", "0")
        self.assertEqual(self.out.read_bytes(), b"old")
        self.assert_succeeds("topk", self.source, self.out)
        self.assertIn("topk_indices", st.read(self.out).tensors)
        self.assertEqual(set(self.listing()), {"in.safetensors", "out.safetensors"})

    def test_permissions(self):
        self.assert_succeeds("metadata", self.source, self.out, umask=0o027)
        self.assertEqual(stat.S_IMODE(self.out.stat().st_mode), 0o640)
        self.out.chmod(0o600)
        self.assert_succeeds("metadata", self.source, self.out, umask=0o022)
        self.assertEqual(stat.S_IMODE(self.out.stat().st_mode), 0o600)

    def test_symbolic_links_stay(self):
        (self.folder / "other").mkdir()
        for target in ("other/new", "other/old"):
            link = self.folder / "link"
            link.unlink(missing_ok=True)
            os.symlink(target, link)
            if target.endswith("old"):
                (self.folder / target).write_bytes(b"old")
            self.assert_succeeds("metadata", self.source, link)
            self.assertTrue(link.is_symlink())
            self.assertIn("starts", st.read(self.folder / target).tensors)

    def test_pipe_and_standard_output_take_the_bytes(self):
        self.assert_succeeds("metadata", self.source, self.out)
        right = self.out.read_bytes()
        done = subprocess.run([BINARY, "metadata", self.source, "/dev/stdout"], capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (0, right))
        target = self.folder / "redirected"
        with open(target, "wb") as file:
            done = subprocess.run([BINARY, "metadata", self.source, "/dev/stdout"], stdout=file)
        self.assertEqual((done.returncode, target.read_bytes()), (0, right))
        os.mkfifo(self.folder / "pipe")
        received = []
        reader = threading.Thread(
            target=lambda: received.append((self.folder / "pipe").read_bytes()))
        reader.start()
        self.assert_succeeds("metadata", self.source, self.folder / "pipe")
        reader.join()
        self.assertEqual(received, [right])

    def test_closed_pipe_is_an_error(self):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run([BINARY, "run", self.source, "/dev/stdout"], stdout=writing,
                              stderr=subprocess.PIPE, text=True)
        os.close(writing)
        self.assertEqual(done.returncode, 2)
        self.assertIn("Broken pipe", done.stderr)

    def test_report_that_cannot_be_printed_is_a_failure(self):
        with open("/dev/full", "wb") as full:
            for arguments in (["info"], ["--help"], ["metadata", self.source, self.out]):
                done = subprocess.run([BINARY, *arguments], stdout=full, stderr=subprocess.PIPE,
                                      text=True)
                self.assertEqual(done.returncode, 4, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1)
        self.assertEqual(set(self.listing()), {"in.safetensors"})

    def test_closed_standard_streams_do_not_reach_the_output(self):
        self.assert_succeeds("metadata", self.source, self.out)
        right = self.out.read_bytes()
        self.out.unlink()
        subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", BINARY, "metadata", self.source,
                        self.out], check=True)
        self.assertEqual(self.out.read_bytes(), right)

    def test_interrupted_writing_leaves_nothing(self):
        """Terminated at whatever moment, the command leaves OUT as it was or complete, and nothing
        beside it."""
        self.write(small_problem(rows=1500, heads=8, width=64))
        command = [BINARY, "run", self.source, self.out, "--deterministic"]
        begin = time.monotonic()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        duration = time.monotonic() - begin
        after = self.listing()
        self.out.write_bytes(b"old")
        before = self.listing()
        for delay in np.linspace(0, 1.1 * duration, 16):
            self.out.write_bytes(b"old")
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=600)
            self.assertIn(code, (0, -signal.SIGTERM))
            # The signal may also come between the renaming and the end of the process.
            self.assertIn(self.listing(), [after] if code == 0 else [before, after])


class Terminal(CommandTest):
    def run_on_terminal(self, rows: int) -> str:
        file = small_problem(rows=rows, heads=8, width=128)
        self.write(file)
        ours, theirs = pty.openpty()
        process = subprocess.Popen([BINARY, "run", self.source, self.out, "--backend", "reference",
                                    "--threads", "1"], stdout=subprocess.DEVNULL, stderr=theirs)
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        self.assertEqual(process.wait(), 0)
        return shown.decode()

    def test_long_work_shows_a_bar_and_erases_it(self):
        shown = ""
        rows = 150
        while "%" not in shown and rows < 10000:
            rows *= 2  # until the computing, not only the copies before it, lasts past two seconds
            shown = self.run_on_terminal(rows)
        self.assertIn("%", shown)
        self.assertTrue(shown.endswith("\r\x1b[K"), shown[-80:])

    def test_short_work_shows_nothing(self):
        for _ in range(5):
            begin = time.monotonic()
            shown = self.run_on_terminal(rows=12)
            if time.monotonic() - begin < 2:
                self.assertEqual(shown, "")
                return
        self.fail("expected one call of five to take less than two seconds, got none")


if __name__ == "__main__":
    unittest.main()
