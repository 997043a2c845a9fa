// Package e2e runs whole sales on a real node with real pods: the demo as a user runs it, and again while its parts are
// killed. It needs root for the local node, or CLUSTER=current and DEMO_DSN for a cluster of yours.
package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

const (
	root  = "../.."
	node  = "hack/cluster/cluster.sh"
	mysql = "hack/mysql/mysql.sh"
)

// nodeUsed says that there is something to take down.
var nodeUsed bool

func needNode(t *testing.T) {
	t.Helper()
	nodeUsed = true
	if os.Geteuid() != 0 && os.Getenv("CLUSTER") != "current" {
		t.Skip("the local node makes namespaces and needs root; CLUSTER=current runs this on a cluster of yours")
	}
}

// command runs a program in the project's folder, and gives each line of its output to see as it comes.
func command(t *testing.T, see func(line string), name string, args ...string) (output string, err error) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = root
	reader, writer := io.Pipe()
	cmd.Stdout, cmd.Stderr = writer, writer
	var all bytes.Buffer
	var wg sync.WaitGroup
	wg.Go(func() {
		lines := bufio.NewScanner(reader)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			all.WriteString(lines.Text() + "\n")
			t.Log(lines.Text())
			if see != nil {
				see(lines.Text())
			}
		}
	})
	err = cmd.Run()
	_ = writer.Close()
	wg.Wait()
	return all.String(), err
}

// inNode runs a program in the node's network.
func inNode(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command(node, append([]string{"exec"}, args...)...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("%s: %v", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out))
}

// TestDemo is what the README promises, twice, for a demo that cannot be run again is none.
func TestDemo(t *testing.T) {
	needNode(t)
	for range 2 {
		output, err := command(t, nil, "hack/demo/demo.sh", "up")
		if err != nil {
			t.Fatalf("make demo: %v", err)
		}
		for _, want := range []string{"100000 buyers clicked", "error          0", "\n0 clicks were tried again", "4 winners paid", "got it, and paid", "Well: 5 of 5 units sold"} {
			if !strings.Contains(output, want) {
				t.Errorf("the output lacks %q", want)
			}
		}
	}
}

// again runs the demo with the parts that are up, and buyers who click again when they are told to.
func again(t *testing.T, see func(line string), args ...string) {
	t.Helper()
	version, err := exec.Command("make", "-s", "-C", root, "print-version").Output()
	if err != nil {
		t.Fatal(err)
	}
	tag := strings.TrimSpace(string(version))
	run := []string{"exec", "dist/demo/demo", "run", "--image=flashsale:" + tag, "--shop-image=flashsale-demo:" + tag, "--dsn-file=dist/demo.dsn", "--clicks=20000"}
	if _, err := command(t, see, node, append(run, args...)...); err != nil {
		t.Errorf("the sale did not end right: %v", err)
	}
}

// processes finds the node's processes of a program: its command line begins with words, and its environment has env.
func processes(t *testing.T, env string, words ...string) []int {
	t.Helper()
	folders, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	var found []int
	for _, f := range folders {
		line, _ := os.ReadFile(f + "/cmdline") // it may have ended meanwhile
		environment, _ := os.ReadFile(f + "/environ")
		if strings.HasPrefix(string(line), strings.Join(words, "\x00")) && strings.Contains("\x00"+string(environment), "\x00"+env+"\x00") {
			pid, err := strconv.Atoi(filepath.Base(f))
			if err != nil {
				t.Fatal(err)
			}
			found = append(found, pid)
		}
	}
	return found
}

// parts finds the node's own processes of a name.
func parts(t *testing.T, name string) []int {
	t.Helper()
	network := inNode(t, "readlink", "/proc/self/ns/net")
	folders, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	var found []int
	for _, f := range folders {
		line, _ := os.ReadFile(f + "/cmdline")
		argv0, _, _ := strings.Cut(string(line), "\x00")
		if in, _ := os.Readlink(f + "/ns/net"); in != network || filepath.Base(argv0) != name {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(f))
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, pid)
	}
	return found
}

// kill -9 of any one process during the demo: the sale still ends right.
func TestKill(t *testing.T) {
	needNode(t)
	if os.Getenv("CLUSTER") == "current" {
		t.Skip("processes of another machine cannot be killed from here")
	}
	saleEnv := func() string {
		return "FLASHSALE_SALE_ID=" + inNode(t, "kubectl", "-n", "flashsale-demo", "get", "flashsale", "iphone17", "-o", "jsonpath={.metadata.uid}")
	}
	shoot := func(t *testing.T, pids []int) {
		if len(pids) == 0 {
			t.Error("nothing to kill was found")
			return
		}
		t.Logf("kill -9 %d", pids[0])
		if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	for _, tt := range []struct {
		name string
		when string // in the demo's output
		kill func(t *testing.T)
	}{
		{"manager", "Live ", func(t *testing.T) { shoot(t, processes(t, "POD_NAMESPACE=flashsale-system", "/manager")) }},
		{"reserver", "Live ", func(t *testing.T) { shoot(t, processes(t, saleEnv(), "/reserver", "serve")) }},
		{"sweeper", "walks away", func(t *testing.T) { shoot(t, processes(t, saleEnv(), "/reserver", "sweep")) }},
		{"mysqld", "Live ", func(t *testing.T) {
			t.Log("kill -9 mysqld")
			inNode(t, mysql, "kill") // its keeper starts it again
		}},
		{"kube-apiserver", "Live ", func(t *testing.T) { shoot(t, parts(t, "kube-apiserver")) }},
		{"kubelet", "Live ", func(t *testing.T) { shoot(t, parts(t, "kubelet")) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("FLASHSALE_MYSQL_NAME", "demo")
			t.Setenv("FLASHSALE_MYSQL_BIND", "10.99.0.1")
			t.Setenv("FLASHSALE_MYSQL_PORT", "3306")
			var once sync.Once
			var killing sync.WaitGroup
			killed := false
			again(t, func(line string) {
				if strings.Contains(line, tt.when) {
					once.Do(func() { killed = true; killing.Go(func() { tt.kill(t) }) })
				}
			})
			killing.Wait()
			if !killed {
				t.Error("the moment to kill did not come")
			}
		})
	}
}

// The controller was down at the scheduled moment: the sale was missed, or fired in a burst after (case K02).
func TestCaseK02(t *testing.T) {
	needNode(t)
	again(t, nil, "--without-operator")
}

// TestMain takes the parts down at the end, unless E2E_KEEP is set.
func TestMain(m *testing.M) {
	if order := os.Getenv("E2E_PROBE"); order != "" {
		if err := beProbe(order); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	if nodeUsed && os.Getenv("E2E_KEEP") == "" && os.Geteuid() == 0 {
		cmd := exec.Command("hack/demo/demo.sh", "down")
		cmd.Dir, cmd.Stdout, cmd.Stderr = root, os.Stderr, os.Stderr
		if err := cmd.Run(); err != nil && code == 0 {
			code = 1
		}
	}
	os.Exit(code)
}
