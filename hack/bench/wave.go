package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

// shelf is what sells units: the product, or one of the two designs.
type shelf interface {
	claim(ctx context.Context, buyer string) (uuid.UUID, error)
	giveBack(ctx context.Context, reservation uuid.UUID) error
	close() error
}

// wave is one measurement of claims on a shelf. It goes to worker processes as JSON.
type wave struct {
	System  string
	DSN     string
	Sale    uuid.UUID // of the product
	Name    string    // unique among the processes, and so are the lines' and buyers' names
	Clients int
	Lines   int
	Window  time.Duration
	Returns bool // give every fourth unit back meanwhile
}

func (w wave) open(ctx context.Context) (shelf, error) {
	if w.System == "flashsale" {
		return openEngine(ctx, w.DSN, w.Sale, w.Name, w.Lines)
	}
	return openDesign(ctx, w.System, w.DSN, w.Name, w.Lines)
}

// returners give units back one by one, beside the clients, as a pod's HTTP handlers would.
const returners = 64

// run opens the shelf, waits for the start, and claims until the window is over or the shelf is empty.
func (w wave) run(ctx context.Context, start func() error) (o outcome, err error) {
	s, err := w.open(ctx)
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := start(); err != nil {
		return o, err
	}
	claim := func(ctx context.Context, client, n int) (uuid.UUID, error) {
		return s.claim(ctx, fmt.Sprintf("%s-%d-%d", w.Name, client, n))
	}
	if !w.Returns {
		return drive(ctx, w.Clients, w.Window, func(ctx context.Context, client, n int) error {
			_, err := claim(ctx, client, n)
			return err
		})
	}
	var (
		back                     = make(chan uuid.UUID, 10_000)
		claims, pending, returns atomic.Int64
		ended                    atomic.Bool
		wg                       sync.WaitGroup
		failed                   = make([]error, returners)
	)
	for i := range returners {
		wg.Go(func() {
			for r := range back {
				if failed[i] == nil && !ended.Load() {
					failed[i] = s.giveBack(ctx, r)
					returns.Add(1)
				}
				pending.Add(-1)
			}
		})
	}
	o, err = drive(ctx, w.Clients, w.Window, func(ctx context.Context, client, n int) error {
		coming := pending.Load() > 0 // asked before the shelf is looked at
		r, err := claim(ctx, client, n)
		if errors.Is(err, errEmpty) && coming {
			time.Sleep(time.Millisecond)
			return errMiss
		}
		if err == nil && claims.Add(1)%4 == 0 {
			pending.Add(1)
			select {
			case back <- r:
			default: // the returners are behind
				pending.Add(-1)
			}
		}
		return err
	})
	ended.Store(true) // nobody waits for the rest
	close(back)
	wg.Wait()
	o.Returned = int(returns.Load())
	return o, errors.Join(append(failed, err)...)
}

// runWave shares the clients among processes; one process is this one.
func (b *bench) runWave(ctx context.Context, w wave, processes int) (outcome, error) {
	return b.measure(ctx, func(ctx context.Context) (outcome, error) {
		if processes == 1 {
			return w.run(ctx, func() error { return nil })
		}
		return w.runProcesses(ctx, processes)
	})
}

// runProcesses starts this program again as workers. Each reads its wave from stdin, writes a line when it is ready,
// starts at the second line of stdin, and writes its outcome. A worker whose stdin ends, ends.
func (w wave) runProcesses(ctx context.Context, processes int) (total outcome, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	program, err := os.Executable()
	if err != nil {
		return total, err
	}
	type process struct {
		cmd *exec.Cmd
		in  *json.Encoder
		out *json.Decoder
	}
	var all []process
	defer func() {
		if err != nil {
			cancel() // kills them; else they end by themselves
		}
		for _, p := range all {
			_ = p.cmd.Wait() // what went wrong was told on stderr, or is the error returned
		}
	}()
	for i := range processes {
		cmd := exec.CommandContext(ctx, program, "worker")
		cmd.Stderr = os.Stderr
		stdin, err := cmd.StdinPipe()
		if err != nil {
			return total, err
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			return total, err
		}
		if err := cmd.Start(); err != nil {
			return total, err
		}
		p := process{cmd, json.NewEncoder(stdin), json.NewDecoder(stdout)}
		all = append(all, p)
		part := w
		part.Name = fmt.Sprintf("%s-p%d", w.Name, i)
		part.Clients = w.Clients*(i+1)/processes - w.Clients*i/processes
		if err := p.in.Encode(part); err != nil {
			return total, err
		}
	}
	var ready string
	for _, p := range all {
		if err := p.out.Decode(&ready); err != nil {
			return total, fmt.Errorf("waiting for a worker to be ready: %w", err)
		}
	}
	for _, p := range all {
		if err := p.in.Encode("start"); err != nil {
			return total, err
		}
	}
	for _, p := range all {
		var o outcome
		if err := p.out.Decode(&o); err != nil {
			return total, fmt.Errorf("waiting for a worker's outcome: %w", err)
		}
		total.add(o)
	}
	return total, nil
}

// worker is one of those processes.
func worker(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	var w wave
	if !in.Scan() {
		return errors.New("worker: this command is for bench itself")
	}
	if err := json.Unmarshal(in.Bytes(), &w); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	o, err := w.run(ctx, func() error {
		if err := out.Encode("ready"); err != nil {
			return err
		}
		if !in.Scan() {
			return errors.New("worker: the parent has gone")
		}
		go func() {
			in.Scan()
			cancel()
		}()
		return nil
	})
	if err != nil && !errors.Is(err, errNone) { // the others may have had all there was
		return err
	}
	return out.Encode(o)
}
