package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// binaries are builds of the reserver by how far their clock is off.
type binaries map[time.Duration]string

const skew = 5 * time.Minute

// build builds the reserver three times: as it is, and with a clock that is ahead and behind.
func build(ctx context.Context, root, folder string) (binaries, error) {
	built := binaries{}
	for _, off := range []time.Duration{0, skew, -skew} {
		out := filepath.Join(folder, fmt.Sprintf("reserver%+ds", int(off.Seconds())))
		args := []string{"build", "-o", out}
		if off != 0 {
			overlay, err := skewedTime(ctx, folder, off)
			if err != nil {
				return nil, fmt.Errorf("writing a skewed clock: %w", err)
			}
			args = append(args, "-overlay", overlay)
		}
		cmd := exec.CommandContext(ctx, "go", append(args, "./reserver")...)
		cmd.Dir = root
		if log, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("building the reserver: %w\n%s", err, log)
		}
		built[off] = out
	}
	return built, nil
}

// skewedTime writes an overlay of the time package whose Now is off. Only the wall clock is: a node with a wrong time of day
// still measures spans right.
func skewedTime(ctx context.Context, folder string, off time.Duration) (overlay string, err error) {
	goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", err
	}
	original := filepath.Join(string(bytes.TrimSpace(goroot)), "src", "time", "time.go")
	source, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	const now = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	skewed := bytes.Replace(source, []byte(now), fmt.Appendf(nil, "%s\tsec += %d\n", now, int(off.Seconds())), 1)
	if bytes.Equal(skewed, source) {
		return "", errors.New("this version of Go has another time.Now")
	}
	file := filepath.Join(folder, fmt.Sprintf("time%+ds.go", int(off.Seconds())))
	overlay = file + ".json"
	return overlay, errors.Join(os.WriteFile(file, skewed, 0o644),
		os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace": {%q: %q}}`, original, file), 0o644))
}

// pod is a reserver or a sweeper, as a process with a proxy of its own in front of MySQL.
type pod struct {
	name  string
	proxy proxy
	api   string // address; "" for a sweeper
	admin string
	off   time.Duration // of its clock
	cmd   func() *exec.Cmd

	mu      sync.Mutex
	running *exec.Cmd
	gone    chan struct{} // closed once it was waited for
}

func (p *pod) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	cmd, gone := p.cmd(), make(chan struct{})
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", p.name, err)
	}
	p.running, p.gone = cmd, gone
	go func() {
		_ = cmd.Wait() // it is killed
		close(gone)
	}()
	return nil
}

// signal sends one. The process may have been killed by the round's other fault.
func (p *pod) signal(s os.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.running.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// kill sends SIGKILL and waits for the end.
func (p *pod) kill() {
	if p.running == nil { // it did not start
		return
	}
	_ = p.signal(syscall.SIGKILL) // which cannot fail on a child of ours
	<-p.gone
}

// ready waits until the process serves, and makes sure that its clock shows what it should.
func (p *pod) ready(ctx context.Context) error {
	return eventually(ctx, time.Minute, p.name+" is ready", func() error {
		request, err := http.NewRequestWithContext(ctx, "GET", "http://"+p.admin+"/readyz", nil)
		if err != nil {
			return err
		}
		answer, err := httpClient.Do(request)
		if err != nil {
			return err
		}
		_ = answer.Body.Close()
		date, err := http.ParseTime(answer.Header.Get("Date"))
		if err != nil {
			return err
		}
		if off := time.Until(date) - p.off; off.Abs() > 3*time.Second {
			return fmt.Errorf("its clock is off by %v, not by %v", off+p.off, p.off)
		}
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		return nil
	})
}
